"""Runs of parameters into the files of a folder, each at its own bytes.

One process makes the files at their full size, headers included; from then on any number of processes write
what they have, in any order, without knowing of each other. Space is taken when the files are made, so a full
disk is found out before anything is written.

Invariant: every byte is written once, by whoever has the element; values are rounded at most once.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zerodrift.dtypes import DType
from zerodrift.errors import NonFiniteError, ZerodriftError
from zerodrift.io.safetensors.files import Box, File, boxes, overlap
from zerodrift.io.safetensors.saving import Block, Shape

CHUNK = 1 << 20
"""Elements that are converted at a time."""
SHORT = 4096
"""Bytes. Runs below it go through a mapping of their tensor rather than through a call each."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block of a parameter goes."""

    file: int
    start: int
    """First byte of its tensor in the file."""
    nbytes: int
    """Of the tensor."""
    dtype: DType
    block: Block


class Sink:
    """The files of one folder, open for writing by parameter."""

    def __init__(self, folder: Path, files: Sequence[File]) -> None:
        self._folder = folder
        self._files = files
        self._open: dict[int, int] = {}
        """Number of a file -> its descriptor."""
        self._places: dict[str, list[_Place]] = {}
        for number, file in enumerate(files):
            for tensor, start in zip(file.tensors, file.starts, strict=True):
                for block in tensor.laid.blocks:
                    place = _Place(number, start, tensor.nbytes, tensor.dtype, block)
                    self._places.setdefault(block.parameter, []).append(place)
        self.written = 0
        """Bytes of tensors written so far."""

    def __contains__(self, name: str) -> bool:
        """Whether a parameter goes anywhere."""
        return name in self._places

    def dtype(self, name: str) -> DType | None:
        """What a parameter is written in; None where its parts differ."""
        found = {place.dtype for place in self._places[name]}
        return found.pop() if len(found) == 1 else None

    def create(self) -> None:
        """Make every file, at its full size and with its header. One process does."""
        for file in self._files:
            path = self._folder / file.name
            with path.open("wb") as out:
                out.write(file.header)
                out.flush()
                if file.size:
                    os.posix_fallocate(out.fileno(), 0, file.size)

    def write(self, name: str, shape: Shape, start: int, values: torch.Tensor) -> None:
        """Elements of a parameter from `start` on, in the row-major flattening of its `shape`."""
        pieces = list(boxes(start, start + values.numel(), shape))
        for place in self._places[name]:
            for box in pieces:
                shared = overlap(box, place.block.low, place.block.shape)
                if shared is not None:
                    self._write(place, _cut(values, box, *shared), shared[0], name)

    def close(self, sync: bool = True) -> None:
        """Let go of the files; with `sync`, when the disk has what was written."""
        opened, self._open = self._open, {}
        try:
            for descriptor in opened.values() if sync else ():
                os.fsync(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)

    def _write(self, place: _Place, values: torch.Tensor, first: Shape, name: str) -> None:
        """A box of values whose first element has index `first` in the parameter."""
        block = place.block
        target = block.start + sum(
            (index - low) * stride for index, low, stride in zip(first, block.low, block.strides, strict=True)
        )
        run, outer = _runs(values.shape, block.strides)
        if outer and run * place.dtype.size < SHORT:
            self._scatter(place, values, target, name)
            return
        rows = values.reshape(-1, run) if outer else values.reshape(1, -1)
        steps = itertools.product(*(range(size) for size in values.shape[: len(outer)]))
        for row, index in zip(rows, steps, strict=True):
            at = target + sum(number * stride for number, stride in zip(index, outer, strict=True))
            for low in range(0, row.numel(), CHUNK):
                data = _converted(row[low : low + CHUNK], place.dtype, name)
                self._put(place, (at + low) * place.dtype.size, data)

    def _put(self, place: _Place, offset: int, values: torch.Tensor) -> None:
        data = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
        at = place.start + offset
        while data:
            count = os.pwrite(self._descriptor(place.file), data, at)
            if count == 0:
                raise ZerodriftError(
                    f"`{self._files[place.file].name}`: must take {len(data)} bytes; took none."
                )
            data, at = data[count:], at + count
            self.written += count

    def _scatter(self, place: _Place, values: torch.Tensor, target: int, name: str) -> None:
        """Elements that lie far apart in the file."""
        data = _converted(values.contiguous(), place.dtype, name)
        page = place.start - place.start % mmap.ALLOCATIONGRANULARITY
        length = place.start + place.nbytes - page
        with mmap.mmap(self._descriptor(place.file), length, offset=page) as mapped:
            count = place.nbytes // place.dtype.size
            flat = torch.frombuffer(mapped, dtype=data.dtype, count=count, offset=place.start - page)
            torch.as_strided(flat, data.shape, place.block.strides, target).copy_(data)
            del flat  # a mapping cannot be closed while something looks at it
        self.written += data.numel() * place.dtype.size

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            self._open[number] = os.open(self._folder / self._files[number].name, os.O_RDWR)
        return self._open[number]


def _cut(values: torch.Tensor, box: Box, first: Shape, sizes: Shape) -> torch.Tensor:
    """The part of a run that is in a box and begins at index `first`, in its shape."""
    count = 1
    for size in box.shape:
        count *= size
    whole = values[box.offset : box.offset + count].view(box.shape)
    return whole[tuple(slice(a - low, a - low + n) for a, low, n in zip(first, box.low, sizes, strict=True))]


def _runs(shape: Iterable[int], strides: Shape) -> tuple[int, Shape]:
    """(elements that follow each other in the file, strides of the dimensions before those)."""
    sizes = tuple(shape)
    run, dim = 1, len(sizes)
    while dim and (sizes[dim - 1] == 1 or strides[dim - 1] == run):
        run *= sizes[dim - 1]
        dim -= 1
    return run, strides[:dim]


def _converted(values: torch.Tensor, dtype: DType, name: str) -> torch.Tensor:
    """On the host, contiguous, in the dtype of the file, rounded to nearest."""
    out = values.detach().to(dtype.torch)
    if dtype is DType.FP16 and out.dtype is not values.dtype:
        lost = out.isinf() & values.isfinite()
        if bool(lost.any()):
            largest = values.abs().max().item()
            raise NonFiniteError(
                f"`{name}`: must fit into fp16, which ends at 65504; got {largest:g}. Export as bf16 or fp32."
            )
    return out.cpu().contiguous()
