"""What autograd saves of a gathered buffer: kept as where it is, so that the buffer's memory can go.

After a unit's forward the graph behind its outputs is gone through, and each view of the unit's buffers that
a node has saved for its backward is replaced by its place in the buffer. When the node runs, the unit is
gathered, if it is not, and the view made anew. So a backward finds its weights however it comes to a node:
through the unit's output, a feature that was captured inside, or a loss that was put aside.

Invariant: only memory is at stake here, never a value. A view that is not found (a node that cannot be
reached, or that keeps tensors its own way) holds the buffer's memory, and a segment never frees what is held.

`_raw_saved_*`, `SavedTensor.data` and `unpack_hook`, and `_sequence_nr` of a node, are torch's own (2.13 to
2.15); the first is in its tutorial on saved tensors.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerodrift.engine.segment import FlatSegment


@dataclass(frozen=True, slots=True)
class SavedView:
    """A view of a segment's full form, by its place."""

    segment: FlatSegment
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements of `dtype`."""
    dtype: torch.dtype
    row: int
    """The parameter of the segment that it is a view of."""
    version: int
    """Of that parameter, when it was saved."""

    def tensor(self) -> torch.Tensor:
        """The view, of a full form that is there."""
        parameter = self.segment.parameters[self.row]
        if parameter._version != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: `{self.segment.rows[self.row].name}` is at version {parameter._version}, and "
                f"version {self.version} was saved"
            )
        full = self.segment.full
        flat = full if full.dtype is self.dtype else full.view(self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


def pack(
    outputs: Iterable[torch.Tensor], after: int, segments: Sequence[FlatSegment], gather: Callable[[], None]
) -> None:
    """Replace what the nodes behind `outputs` have saved of full segments; `after` is the newest node that
    was there before. `gather` makes the segments full."""
    # Parameters may be of classes that would be asked for each of their attributes.
    with torch._C.DisableTorchFunctionSubclass():
        buffers = [_Buffer.of(segment) for segment in segments]
        for raw, tensor in _saved(outputs, after):
            view = _view_of(tensor, buffers)
            if view is not None:
                raw.register_hooks(functools.partial(_place, view), functools.partial(_unpack, gather))


def _place(view: SavedView, saved: torch.Tensor) -> SavedView:
    return view


def _unpack(gather: Callable[[], None], view: SavedView) -> torch.Tensor:
    if not view.segment.is_full:
        gather()
    return view.tensor()


def _saved(outputs: Iterable[torch.Tensor], after: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """Where newer nodes have saved a tensor that nobody has packed, and that tensor."""
    waiting: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    visited = set()
    while waiting:
        node = waiting.pop()
        if node in visited or node._sequence_nr() <= after:
            continue
        visited.add(node)
        kind: Any = type(node)
        for name in _names(kind):
            saved = getattr(node, name)
            for raw in saved if isinstance(saved, tuple) else (saved,):
                if raw is not None and raw.unpack_hook is None:
                    tensor = raw.data
                    if tensor is not None:
                        yield raw, tensor
        waiting += [following for following, _ in node.next_functions if following is not None]


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    """The attributes of a kind of node that hold what it has saved."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Where the full form of a segment is."""

    segment: FlatSegment
    start: int
    end: int
    size: int
    """Of an element."""

    @classmethod
    def of(cls, segment: FlatSegment) -> _Buffer:
        start, size = segment.full.data_ptr(), segment.full.element_size()
        return cls(segment, start, start + segment.full.numel() * size, size)


def _view_of(tensor: torch.Tensor, buffers: Sequence[_Buffer]) -> SavedView | None:
    # Another layout keeps its bytes in its own way, as do tensors around tensors, of `torch.func` too.
    if (
        (type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor))
        or tensor.layout is not torch.strided
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    ):
        return None
    address = tensor.data_ptr()
    for buffer in buffers:
        if not buffer.start <= address < buffer.end:
            continue
        if tensor.is_conj() or tensor.is_neg():  # a pending conjugation is no place
            return None
        segment = buffer.segment
        row = bisect_right(segment.starts, (address - buffer.start) // buffer.size) - 1
        place = int(tensor.storage_offset())
        version = segment.parameters[row]._version
        return SavedView(segment, tuple(tensor.shape), tensor.stride(), place, tensor.dtype, row, version)
    return None
