"""What a person sees while weights are read: a bar with bytes per second, once it takes a while.

Invariant: nothing is written where standard error is no terminal, nor in the first seconds.
"""

from __future__ import annotations

import sys
import time

PATIENCE = 2.0
"""Seconds before a bar appears."""


class ProgressBar:
    """Counts bytes; shows them when there is somebody to see them."""

    def __init__(self, title: str, total: int, shown: bool) -> None:
        self._title, self._total = title, total
        self._shown = shown and sys.stderr.isatty()
        self._begin = time.monotonic()
        self._count = 0
        self._bar: object | None = None
        self._task: object | None = None

    def __call__(self, count: int) -> None:
        self._count += count
        if not self._shown:
            return
        if self._bar is None and time.monotonic() - self._begin > PATIENCE:
            self._start()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._count)  # type: ignore[attr-defined]

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=False),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar, self._task = bar, bar.add_task(self._title, total=self._total)
        bar.start()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]
        self._shown, self._bar = False, None
