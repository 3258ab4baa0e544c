"""Memory outside the heap: for tensors that live between steps, for large buffers of a step, and for packed
runs of a flat narrow format.

`malloc` would mix resting tensors with the buffers of a step in one heap. The gaps that one step leaves are
then too small for the buffers of the next, and the heap grows. A separate mapping leaves no gaps, and returns
to the system with its tensor.

A new page from the system costs more than the copy that fills it. So buffers of a step keep their pages
from one step to the next, and between steps the system may take the pages back when it runs short.

`narrow.py` has the layout of a packed run and its numbers. A record is one block as it is saved: its codes,
then its scale. So the records of a parameter are the same bytes, whichever runs have its blocks.

Invariant: a tensor has memory of its own, contiguous and zero. Blocks of a run that are not written, and
copied records, keep every bit.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from zerodrift.dtypes import DType
from zerodrift.kernels import narrow

LEAST = 1 << 20
"""Bytes of the smallest mapped tensor. For smaller tensors, whole pages cost more than they save."""

WINDOW = 1 << 18
"""Elements that are encoded or decoded at a time."""


def resting_zeros(size: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, as `torch.zeros` does, for a tensor that lives between steps."""
    shape = torch.Size([size] if isinstance(size, int) else size)
    count = shape.numel()
    if device.type != "cpu" or count * dtype.itemsize < LEAST or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(_map(count * dtype.itemsize), dtype=dtype).view(shape)


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class HostBuffers:
    """Host memory that the buffers of a step reuse.

    Keeps mappings and no tensors, and forgets a mapping whose tensor is dropped instead of released.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lent: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
        """Mappings by address, each kept by its tensor."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized flat tensor."""
        size = numel * dtype.itemsize
        if size < LEAST or sys.platform != "linux":
            return torch.empty(numel, dtype=dtype)
        fits = [mapped for mapped in self._free if len(mapped) >= size]
        if fits:
            mapped = min(fits, key=len)
            self._free.remove(mapped)
        else:
            del self._free[:1]  # so that there are never more mappings than were in use at once
            mapped = _map(size)
        flat = torch.frombuffer(mapped, dtype=dtype, count=numel)
        self._lent[flat.data_ptr()] = mapped
        return flat

    def give(self, flat: Tensor) -> None:
        mapped = self._lent.pop(flat.data_ptr(), None)
        if mapped is not None:
            self._free.append(mapped)

    def make_room(self, size: int) -> None:
        """Drop the free mappings if none of them has `size` bytes."""
        if all(len(mapped) < size for mapped in self._free):
            self._free.clear()

    def rest(self) -> None:
        """Let the system take the pages of free mappings if it needs them before the next step."""
        try:
            for mapped in self._free:
                mapped.madvise(mmap.MADV_FREE)
        except (AttributeError, OSError):  # a system without it
            self._free.clear()


class PackedRun:
    """The codes and scales of `numel` elements in a packed run."""

    def __init__(self, dtype: DType, data: Tensor, numel: int) -> None:
        """Shape of `data`: [nbytes], uint8."""
        form = narrow.form_of(dtype)
        if not isinstance(form.block, int) or numel % form.block:
            raise AssertionError(f"{numel} elements in {form.describe()} are no packed run")
        self.dtype, self.data, self.numel, self.block = dtype, data, numel, form.block
        codes, scales = data.tensor_split([numel * form.element.bits // 8])
        blocks = numel // self.block
        self.codes = codes.view(blocks, self.block * form.element.bits // 8)
        """Shape [blocks, bytes of a block's codes], uint8."""
        self.scales = scales.view(blocks, form.scale_bytes)
        """Shape [blocks, bytes of a scale], uint8."""

    @staticmethod
    def empty(dtype: DType, numel: int, device: torch.device | None = None) -> PackedRun:
        return PackedRun(dtype, torch.empty(dtype.nbytes(numel), dtype=torch.uint8, device=device), numel)

    @torch.no_grad()
    def encode(self, start: int, values: Tensor) -> None:
        """Encode flat values, from the start of a block on. A partial last block is filled with zeros."""
        for first in range(0, values.numel(), WINDOW):
            part = values[first : first + WINDOW]
            whole = torch.nn.functional.pad(part, (0, -part.numel() % self.block))
            run = PackedRun.empty(self.dtype, whole.numel(), values.device)
            narrow.encode(self.dtype, whole, run.data)
            self.copy(start + first, run)

    @torch.no_grad()
    def decode(self, start: int, out: Tensor) -> None:
        """Decode into flat `out`, in its dtype, from the first element of a block on."""
        for first in range(0, out.numel(), WINDOW):
            part = out[first : first + WINDOW]
            run = self.part(start + first, part.numel())
            whole = part if run.numel == part.numel() else part.new_empty(run.numel)
            narrow.decode(self.dtype, run.data, whole)
            if whole is not part:
                part.copy_(whole[: part.numel()])

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return all values. Shape [numel]."""
        out = torch.empty(self.numel, dtype=dtype, device=self.data.device)
        self.decode(0, out)
        return out

    @torch.no_grad()
    def store(self, values: Tensor) -> None:
        """Encode the blocks whose values differ from the stored ones. Shape [numel]."""
        before, after = self.values().view(-1, self.block), values.float().view(-1, self.block)
        differ = ((before != after) & ~(before.isnan() & after.isnan())).any(1)
        if differ.any():
            run = PackedRun.empty(self.dtype, int(differ.sum()) * self.block, values.device)
            run.encode(0, after[differ].view(-1))
            self.codes[differ], self.scales[differ] = run.codes, run.scales

    # --- blocks as bytes --------------------------------------------------------------------------------

    def part(self, start: int, numel: int) -> PackedRun:
        """Copy the blocks of `numel` elements, from the first element of a block on."""
        blocks = self._blocks(start, numel)
        run = PackedRun.empty(self.dtype, (blocks.stop - blocks.start) * self.block, self.data.device)
        run.codes.copy_(self.codes[blocks])
        run.scales.copy_(self.scales[blocks])
        return run

    def copy(self, start: int, run: PackedRun) -> None:
        """Copy another run's blocks to the first element of a block."""
        blocks = self._blocks(start, run.numel)
        self.codes[blocks] = run.codes
        self.scales[blocks] = run.scales

    def records(self, start: int, numel: int) -> Tensor:
        """Copy the records of blocks. Shape [bytes], uint8."""
        blocks = self._blocks(start, numel)
        return torch.cat([self.codes[blocks], self.scales[blocks]], 1).view(-1)

    def set_records(self, start: int, records: Tensor) -> None:
        """Write records, as `records` returns them."""
        rows = records.view(-1, self.codes.shape[1] + self.scales.shape[1])
        blocks = self._blocks(start, len(rows) * self.block)
        self.codes[blocks] = rows[:, : self.codes.shape[1]]
        self.scales[blocks] = rows[:, self.codes.shape[1] :]

    def _blocks(self, start: int, numel: int) -> slice:
        return slice(start // self.block, -(-(start + numel) // self.block))
