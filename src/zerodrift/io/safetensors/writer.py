"""Runs of parameters into the files of a folder, each at its own bytes.

One process makes the files at their full size, headers included; from then on any number of processes write
what they have, in any order, without knowing of each other. Space is taken when the files are made, so a full
disk is found out before anything is written. Where an element goes is said by the boxes that a reader would
find it by.

Invariant: every byte is written once, by whoever has the element; values are rounded at most once.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zerodrift.dtypes import DType
from zerodrift.errors import NonFiniteError, ZerodriftError
from zerodrift.io.safetensors.boxes import Box, BoxAxis, within
from zerodrift.io.safetensors.files import SavedTensor, TensorFile

CHUNK = 1 << 20
"""Elements that are converted at a time."""
SHORT = 4096
"""Bytes. Runs below it go through a mapping of their tensor rather than through a call each."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a box of a parameter goes."""

    file: int
    start: int
    """First byte of its tensor in the file."""
    tensor: SavedTensor
    box: Box


class SafetensorsWriter:
    """The files of one folder, open for writing by parameter."""

    def __init__(self, folder: Path, files: Sequence[TensorFile]) -> None:
        self._folder = folder
        self._files = files
        self._open: dict[int, int] = {}
        """Number of a file -> its descriptor."""
        self._targets: dict[str, list[_Target]] = {}
        for number, file in enumerate(files):
            for tensor, start in zip(file.tensors, file.starts, strict=True):
                for part in tensor.parts:
                    home = _Target(number, start, tensor, part.box)
                    self._targets.setdefault(part.parameter, []).append(home)
        self.written = 0
        """Bytes of tensors written so far."""

    def __contains__(self, name: str) -> bool:
        """Whether elements of a parameter go anywhere."""
        return name in self._targets

    def dtype(self, name: str) -> DType | None:
        """What a parameter is written in; None where its parts differ."""
        dtypes = {home.tensor.dtype for home in self._targets[name]}
        return dtypes.pop() if len(dtypes) == 1 else None

    def create(self) -> None:
        """Make every file, at its full size and with its header. One process does."""
        for file in self._files:
            path = self._folder / file.name
            with path.open("wb") as out:
                out.write(file.header)
                out.flush()
                if file.size:
                    os.posix_fallocate(out.fileno(), 0, file.size)

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Elements of a parameter from `start` on, in its row-major flattening."""
        for home in self._targets[name]:
            for box in within((home.box,), start, start + values.numel()):
                self._write(home, box, box.of_target(values, start), name)

    def close(self, sync: bool = True) -> None:
        """Let go of the files; with `sync`, when the disk has what was written."""
        opened, self._open = self._open, {}
        try:
            for descriptor in opened.values() if sync else ():
                os.fsync(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)

    def _write(self, home: _Target, box: Box, values: torch.Tensor, name: str) -> None:
        """The values of one box, in its shape."""
        dtype = home.tensor.dtype
        run, outer = _runs(box)
        if outer and run * dtype.size < SHORT:
            self._scatter(home, box, values, name)
            return
        for index in itertools.product(*(range(axis.size) for axis in outer)):
            row = values[index].reshape(-1)
            at = box.origin + sum(n * axis.source for n, axis in zip(index, outer, strict=True))
            for low in range(0, run, CHUNK):
                data = _converted(row[low : low + CHUNK], dtype, name)
                self._put(home, (at + low) * dtype.size, data)

    def _put(self, home: _Target, offset: int, values: torch.Tensor) -> None:
        data = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
        at = home.start + offset
        while data:
            count = os.pwrite(self._descriptor(home.file), data, at)
            if count == 0:
                must = f"must take {len(data)} bytes"
                raise ZerodriftError(self._files[home.file].name, must, got="none taken")
            data, at = data[count:], at + count
            self.written += count

    def _scatter(self, home: _Target, box: Box, values: torch.Tensor, name: str) -> None:
        """Elements that lie far apart in the file."""
        data = _converted(values.contiguous(), home.tensor.dtype, name)
        page = home.start - home.start % mmap.ALLOCATIONGRANULARITY
        length = home.start + home.tensor.nbytes - page
        with mmap.mmap(self._descriptor(home.file), length, offset=page) as mapped:
            count, start = home.tensor.numel, home.start - page
            flat = torch.frombuffer(mapped, dtype=data.dtype, count=count, offset=start)
            box.of_source(flat).copy_(data)
            del flat  # a mapping cannot be closed while something looks at it
        self.written += data.numel() * home.tensor.dtype.size

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            self._open[number] = os.open(self._folder / self._files[number].name, os.O_RDWR)
        return self._open[number]


def _runs(box: Box) -> tuple[int, tuple[BoxAxis, ...]]:
    """(elements that follow each other in the file, the axes around them)."""
    run, inner = 1, len(box.axes)
    while inner and box.axes[inner - 1].source == run:
        run *= box.axes[inner - 1].size
        inner -= 1
    return run, box.axes[:inner]


def _converted(values: torch.Tensor, dtype: DType, name: str) -> torch.Tensor:
    """On the host, contiguous, in the dtype of the file, rounded to nearest."""
    out = values.detach().to(dtype.torch)
    if dtype is DType.FP16 and out.dtype is not values.dtype:
        lost = out.isinf() & values.isfinite()
        if bool(lost.any()):
            largest = values.abs().max().item()
            raise NonFiniteError(
                name,
                "must fit into fp16, which ends at 65504",
                got=f"{largest:g}",
                do="Export as bf16 or fp32.",
            )
    return out.cpu().contiguous()
