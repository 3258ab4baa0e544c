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
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerodrift.engine.segment import FlatSegment

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The node of a leaf, which saves nothing."""


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
        unpack = functools.partial(_unpack, gather)
        for raw, view in _saved_views(outputs, after, buffers):
            raw.register_hooks(functools.partial(_place, view), unpack)


def _place(view: SavedView, saved: torch.Tensor) -> SavedView:
    return view


def _unpack(gather: Callable[[], None], view: SavedView) -> torch.Tensor:
    if not view.segment.is_full:
        gather()
    return view.tensor()


def _saved_views(
    outputs: Iterable[torch.Tensor], after: int, buffers: Sequence[_Buffer]
) -> list[tuple[Any, SavedView]]:
    """Where newer nodes have saved a view that nobody has packed, and that view. Every tensor of every node
    comes by here, so what is none is told by its address alone."""
    lowest = min([buffer.start for buffer in buffers], default=0)
    highest = max([buffer.end for buffer in buffers], default=0)
    visited: set[Any] = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    nodes = list(visited)
    found = []
    for node in nodes:  # which grows meanwhile
        if node._sequence_nr() <= after:
            continue
        kind: Any = type(node)
        read = _reader(kind)
        for saved in () if read is None else read(node)[:-1]:
            for raw in saved if type(saved) is tuple else (saved,):
                if raw is None or raw.unpack_hook is not None:
                    continue
                tensor = raw.data
                if tensor is None:
                    continue
                try:
                    address = tensor.data_ptr()
                except RuntimeError:
                    continue  # it has none: another layout, or a tensor around tensors
                if lowest <= address < highest:
                    view = _view_of(tensor, address, buffers)
                    if view is not None:
                        found.append((raw, view))
        for following, _ in node.next_functions:
            if following is None or type(following) is _LEAF or following in visited:
                continue
            visited.add(following)
            nodes.append(following)
    return found


@functools.cache
def _reader(kind: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    """What gives all that a kind of node has saved, and its class, so that it is a tuple; None where a kind
    saves nothing."""
    names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    return operator.attrgetter(*names, "__class__") if names else None


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Where the full form of a segment is."""

    segment: FlatSegment
    start: int
    end: int
    size: int
    """Of an element."""
    is_complex: bool

    @classmethod
    def of(cls, segment: FlatSegment) -> _Buffer:
        full = segment.full
        start, size = full.data_ptr(), full.itemsize
        return cls(segment, start, start + full.numel() * size, size, full.dtype.is_complex)


def _view_of(tensor: torch.Tensor, address: int, buffers: Sequence[_Buffer]) -> SavedView | None:
    # Another layout keeps its bytes in its own way, as do tensors around tensors, of `torch.func` too.
    if (
        (type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor))
        or tensor.layout is not torch.strided
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    ):
        return None
    for buffer in buffers:
        if not buffer.start <= address < buffer.end:
            continue
        if buffer.is_complex and (tensor.is_conj() or tensor.is_neg()):  # a pending conjugation is no place
            return None
        segment = buffer.segment
        row = bisect_right(segment.starts, (address - buffer.start) // buffer.size) - 1
        place = int(tensor.storage_offset())
        version = segment.parameters[row]._version
        return SavedView(segment, tensor.shape, tensor.stride(), place, tensor.dtype, row, version)
    return None
