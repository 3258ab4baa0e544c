"""Read boxes of tensors from files, straight to their place or through a bounded buffer.

A progress bar for readers and writers is here too.

Invariant: no more than CHUNK bytes are held, and `count` is the number of bytes that were read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerodrift.errors import ModelError
from zerodrift.model import StoredTensor
from zerodrift.weights.boxes import Box, simplified

if TYPE_CHECKING:
    from rich.progress import Progress

CHUNK = 2 << 20
FILES = 64
SPARSE = 2
"""A span is read as a whole if at least one of this many elements is wanted."""
POPULATE_WRITE = 23
"""Number of the `madvise` request, which Python's `mmap` does not name. Linux 5.14 and later know it."""
SEEK = 4096
"""Bytes below which skipping costs more than reading."""


class SafetensorsReader:
    """Reads tensors of files. Not safe for several threads."""

    def __init__(self, progress: Callable[[int], None] = lambda count: None) -> None:
        self._progress = progress
        self._open: dict[Path, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
        self.count = 0

    def close(self) -> None:
        for number in self._open.values():
            os.close(number)
        self._open.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, stored: StoredTensor, box: Box, out: torch.Tensor, first: int = 0) -> None:
        box = simplified(box)
        if box.is_run:
            start = box.start - first
            self._run(stored, box.origin, out[start : start + box.numel])
        else:
            for part in spans(box, stored.dtype.size):
                values = self.staged(stored, part.origin, part.span)
                part.of_target(out, first).copy_(part.of_source(values, part.origin))

    def _run(self, stored: StoredTensor, origin: int, out: torch.Tensor) -> None:
        dtype, on_host = stored.dtype.torch, out.device.type == "cpu"
        step = CHUNK // dtype.itemsize
        for first in range(0, out.numel(), step):
            part = out[first : first + step]
            if on_host:
                self._create_pages(part)
            if on_host and out.dtype is dtype:
                self._bytes(stored, origin + first, part)
            else:
                part.copy_(self.staged(stored, origin + first, part.numel()))

    def _create_pages(self, tensor: torch.Tensor) -> None:
        """Create the pages of contiguous host memory at once, if the system can. A read of 1 GiB then takes a
        tenth less processor time (`bench/load.py`)."""
        if self._madvise is not None:
            low = tensor.data_ptr() & -mmap.PAGESIZE
            count = tensor.data_ptr() + tensor.nbytes - low
            if self._madvise(ctypes.c_void_p(low), ctypes.c_size_t(count), POPULATE_WRITE):
                self._madvise = None

    def staged(self, stored: StoredTensor, first: int, count: int) -> torch.Tensor:
        """Read elements into the buffer; the next call overwrites them."""
        size = count * stored.dtype.size
        if self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, min(CHUNK, 2 * size)), dtype=torch.uint8, device="cpu")
        values = self._buffer[:size].view(stored.dtype.torch)
        self._bytes(stored, first, values)
        return values

    def _bytes(self, stored: StoredTensor, first: int, into: torch.Tensor) -> None:
        """Fill `into`, contiguous and in the tensor's own dtype, from element `first` on."""
        room = memoryview(into.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
        place = stored.start + first * stored.dtype.size
        number = self._descriptor(stored.file)
        while room:
            try:
                count = os.preadv(number, [room], place)
            except OSError as error:
                raise _unreadable(stored, error.strerror or str(error)) from error
            if not count:
                raise _unreadable(stored, f"an end at byte {place:,}")
            self.count += count
            self._progress(count)
            room, place = room[count:], place + count

    def _descriptor(self, file: Path) -> int:
        descriptor = self._open.pop(file, None)
        if descriptor is None:
            if len(self._open) >= FILES:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                got = error.strerror or str(error)
                raise ModelError(file, "must be a file that can be read", got=got) from error
        self._open[file] = descriptor  # the last used is closed last
        return descriptor


def spans(box: Box, size: int) -> Iterator[Box]:
    """Cut a box into parts whose spans fit into the buffer and consist mostly of wanted elements."""
    reach = [(axis.size - 1) * axis.source for axis in box.axes]
    span = box.span
    if span * size <= CHUNK and (span <= SPARSE * box.numel or span * size <= SEEK):
        yield box
        return
    outer = max(range(len(reach)), key=lambda n: box.axes[n].source)
    axis = box.axes[outer]
    inner = span - reach[outer]
    if axis.source * size > SEEK and inner <= axis.source and span > SPARSE * box.numel:
        count = 1  # the gaps between steps are worth a call
    else:
        count = max(1, min(axis.size, (CHUNK // size - inner) // max(1, axis.source) + 1))
    if count >= axis.size:
        yield box
        return
    for first in range(0, axis.size, count):
        part = box.at(outer, first, min(count, axis.size - first))
        axes = tuple(a for a in part.axes if a.size > 1)
        yield from spans(Box(part.number, part.start, part.origin, axes), size)


def _unreadable(stored: StoredTensor, got: str) -> ModelError:
    must = f"`{stored.name}` must be readable in it, bytes {stored.start:,} to {stored.stop:,}"
    return ModelError(stored.file, must, got=got, do="It was changed or cut short meanwhile.")


PATIENCE = 2.0
"""Seconds before a bar is shown."""


class ProgressBar:
    """Counts bytes, and shows them if `shown` and there is a terminal."""

    def __init__(self, title: str, total: int, shown: bool) -> None:
        self._title, self._total = title, total
        self._shown = shown and sys.stderr.isatty()
        self._begin = 0.0
        """Time of the first bytes."""
        self._count = 0
        self._bar: Progress | None = None

    def __call__(self, count: int) -> None:
        self._begin = self._begin or time.monotonic()
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
