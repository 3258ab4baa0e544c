"""Bytes out of files into tensors: positioned reads, a bounded buffer, a count of every byte.

Which bytes are wanted is decided by whoever calls; here a `Box` is read with as few calls as its strides
allow and put where it belongs. A run goes straight to its place where the dtypes agree and the place is in
host memory. Anything else passes through one buffer of CHUNK bytes.

Invariant: no more than CHUNK bytes are held, and `count` is what the operating system was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from zerodrift.errors import ModelError
from zerodrift.io.safetensors.boxes import Box, simplified
from zerodrift.io.safetensors.pages import Pages
from zerodrift.model.header import Stored

CHUNK = 2 << 20
"""Bytes of one read. A larger one is not faster: what is converted is still in the cache then."""
FILES = 64
"""Files that are open at once."""
SPARSE = 2
"""A span is read as a whole where at least one in so many of its elements is wanted."""
SEEK = 4096
"""Bytes below which leaving some out costs more than reading them."""


class SafetensorsReader:
    """Reads tensors of files. Not safe for several threads."""

    def __init__(self, progress: Callable[[int], None] = lambda count: None) -> None:
        self._progress = progress
        self._open: dict[Path, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pages = Pages()
        self.count = 0
        """Bytes read so far."""

    def close(self) -> None:
        for number in self._open.values():
            os.close(number)
        self._open.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, stored: Stored, box: Box, out: torch.Tensor, first: int = 0) -> None:
        """The elements of one box of a tensor into flat `out`, which begins at element `first` of the
        target."""
        box = simplified(box)
        if box.is_run:
            start = box.start - first
            self._run(stored, box.origin, out[start : start + box.numel])
        else:
            for part in _spans(box, stored.dtype.size):
                values = self._staged(stored, part.origin, part.span)
                part.of_target(out, first).copy_(part.of_source(values, part.origin))

    def _run(self, stored: Stored, origin: int, out: torch.Tensor) -> None:
        dtype = stored.dtype.torch
        near = out.device.type == "cpu"
        step = CHUNK // dtype.itemsize
        for first in range(0, out.numel(), step):
            part = out[first : first + step]
            if near:
                self._pages.ready(part)
            if near and out.dtype is dtype:
                self._bytes(stored, origin + first, part)
            else:
                part.copy_(self._staged(stored, origin + first, part.numel()))

    def _staged(self, stored: Stored, first: int, count: int) -> torch.Tensor:
        """Elements of a tensor in the buffer, until the next call."""
        size = count * stored.dtype.size
        if self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, min(CHUNK, 2 * size)), dtype=torch.uint8)
        values = self._buffer[:size].view(stored.dtype.torch)
        self._bytes(stored, first, values)
        return values

    def _bytes(self, stored: Stored, first: int, into: torch.Tensor) -> None:
        """Fill `into`, contiguous and in the tensor's own dtype, from element `first` on."""
        room = memoryview(into.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
        place = stored.start + first * stored.dtype.size
        number = self._descriptor(stored.file)
        while room:
            try:
                got = os.preadv(number, [room], place)
            except OSError as error:
                raise _unreadable(stored, error.strerror or str(error)) from error
            if not got:
                raise _unreadable(stored, f"an end at byte {place:,}")
            self.count += got
            self._progress(got)
            room, place = room[got:], place + got

    def _descriptor(self, file: Path) -> int:
        descriptor = self._open.pop(file, None)
        if descriptor is None:
            if len(self._open) >= FILES:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            except OSError as error:
                must = "must be a file that can be read"
                raise ModelError(str(file), must, got=error.strerror or str(error)) from error
        self._open[file] = descriptor  # last in, last to be closed
        return descriptor


def _spans(box: Box, size: int) -> Iterator[Box]:
    """Parts of a box that are each read at once: short enough, and with little that is not wanted."""
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
        yield from _spans(Box(part.number, part.start, part.origin, axes), size)


def _unreadable(stored: Stored, got: str) -> ModelError:
    must = f"`{stored.name}` must be readable in it, bytes {stored.start:,} to {stored.stop:,}"
    return ModelError(str(stored.file), must, got=got, do="It was changed or cut short meanwhile.")
