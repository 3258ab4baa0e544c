"""Show a bar with bytes per second on a terminal, after PATIENCE seconds."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE = 2.0


class ProgressBar:
    """Counts bytes, and shows them if `shown` and there is a terminal."""

    def __init__(self, title: str, total: int, shown: bool) -> None:
        self._title, self._total = title, total
        self._shown = shown and sys.stderr.isatty()
        self._begin = time.monotonic()
        self._count = 0
        self._bar: Progress | None = None

    def __call__(self, count: int) -> None:
        self._count += count
        if self._shown and self._bar is None and time.monotonic() - self._begin > PATIENCE:
            self._bar = _start(self._title, self._total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._count)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._shown, self._bar = False, None


def _start(title: str, total: int) -> Progress:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=False),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(title, total=total)
    bar.start()
    return bar
