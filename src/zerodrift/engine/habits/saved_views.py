"""Replace views of a gathered buffer that autograd has saved by their place, so that the buffer can be freed.

After a unit's forward the graph behind its outputs is searched for views of the unit's buffers that nodes
have saved for their backward. Each is packed as its place in the buffer. When a backward reaches the node,
the unit is gathered if necessary, and the view is made again. Most forwards build the same graph as the
forward before, so the nodes that had views then are searched first, and all nodes only if a tensor still
holds the buffers.

Invariant: only memory depends on this, never a value. A view that is not found (its node cannot be reached,
or saves tensors in its own way) holds the buffer's memory, and a segment never frees memory that is held.

`_raw_saved_*`, `SavedTensor.data` and `unpack_hook`, and `_sequence_nr` of a node, are torch's own (2.13 to
2.15); the first is in its tutorial on saved tensors.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerodrift.engine.segment import FlatSegment

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class SavedView:
    """A view of a segment's full form, as its place."""

    segment: FlatSegment
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    row: int
    """The number of the parameter in which the view begins."""

    def matches(self, raw: Any) -> bool:
        """Return whether a node has saved this view, unpacked."""
        if raw.unpack_hook is not None:
            return False
        full = self.segment.full
        try:
            tensor = raw.data
            return (
                type(tensor) in _PLAIN
                and tensor.shape == self.size
                and tensor.dtype is self.dtype
                and tensor.data_ptr() == full.data_ptr() + self.offset * self.dtype.itemsize
                and tensor.stride() == self.stride
                and not (full.dtype.is_complex and (tensor.is_conj() or tensor.is_neg()))
            )
        except RuntimeError:
            return False  # as in `_find_view`


class Packing:
    """Packs the views that graphs of one unit have saved."""

    def __init__(self) -> None:
        self._route = _Route([], [])

    def pack(
        self,
        outputs: Sequence[torch.Tensor],
        after: int,
        segments: Sequence[FlatSegment],
        gather: Callable[[], None],
    ) -> None:
        """Pack views in the nodes behind `outputs` that are newer than node `after`."""
        # Without this, every attribute of a pinned parameter is a call of its class.
        with torch._C.DisableTorchFunctionSubclass():
            unpack = functools.partial(_unpack, gather)
            again = self._route.follow(outputs)
            for raw, view in again:
                _replace(raw, view, unpack)
            if not any([segment.is_held for segment in segments]):
                return
            route, found = _find_views(outputs, after, list(map(_extent, segments)))
            for raw, view in found:
                _replace(raw, view, unpack)
            if found:  # a route to some of the views would be incomplete: search again next time
                self._route = _Route([], []) if again else route


def _replace(raw: Any, view: SavedView, unpack: Callable[[Any], torch.Tensor]) -> None:
    packed = view, view.segment.parameters[view.row]._version
    if raw.unpack_hook is None:
        raw.register_hooks(lambda saved: packed, unpack)


def _unpack(gather: Callable[[], None], packed: tuple[SavedView, int]) -> torch.Tensor:
    view, version = packed
    segment = view.segment
    if not segment.is_full:
        gather()
    parameter = segment.parameters[view.row]
    if parameter._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: `{segment.rows[view.row].name}` is at version {parameter._version}, and "
            f"version {version} was saved"
        )
    flat = segment.full if segment.full.dtype is view.dtype else segment.full.view(view.dtype)
    return flat.as_strided(view.size, view.stride, view.offset)


def _find_views(
    outputs: Sequence[torch.Tensor], after: int, buffers: Sequence[tuple[int, int, FlatSegment]]
) -> tuple[_Route, list[tuple[Any, SavedView]]]:
    """Find unpacked views that newer nodes have saved, and the route to them. Most saved tensors are excluded
    by their address, because all tensors of all nodes are looked at."""
    visited: set[Any] = set()
    nodes: list[tuple[Any, int, int]] = []
    """(node, place in this list of the node before or -1, edge or output that led to the node)."""
    for number, output in enumerate(outputs):
        if output.grad_fn is not None and output.grad_fn not in visited:
            visited.add(output.grad_fn)
            nodes.append((output.grad_fn, -1, number))
    found, reads = [], []
    for at, (node, _, _) in enumerate(nodes):  # the list grows meanwhile
        if node._sequence_nr() <= after:
            continue
        kind: Any = type(node)
        for name in _saved_attributes(kind):
            saved = getattr(node, name)
            for place, raw in enumerate(saved) if type(saved) is tuple else ((-1, saved),):
                view = None if raw is None else _find_view(raw, buffers)
                if view is not None:
                    found.append((raw, view))
                    reads.append((at, name, place, view))
        for edge, (following, _) in enumerate(node.next_functions):
            if following is None or type(following) is _LEAF or following in visited:
                continue
            visited.add(following)
            nodes.append((following, at, edge))
    needed: set[int] = set()
    for at, *_ in reads:
        while at >= 0 and at not in needed:
            needed.add(at)
            at = nodes[at][1]
    step_of = {at: step for step, at in enumerate(sorted(needed))} | {-1: -1}
    steps = [(step_of[nodes[at][1]], nodes[at][2], type(nodes[at][0])) for at in sorted(needed)]
    return _Route(steps, [(step_of[at], *rest) for at, *rest in reads]), found


def _find_view(raw: Any, buffers: Sequence[tuple[int, int, FlatSegment]]) -> SavedView | None:
    """Return the saved tensor as a view of a buffer, if it is one and unpacked."""
    if raw.unpack_hook is not None:
        return None
    try:
        tensor = raw.data
        if tensor is None:
            return None
        address = tensor.data_ptr()
    except RuntimeError:
        return None  # without an address: another layout, a wrapper of tensors, or freed by its node
    for start, end, segment in buffers:
        if start <= address < end:
            return _view_of(tensor, address - start, segment)
    return None


class _Route:
    """The nodes between the outputs of a graph and the views that it has saved."""

    def __init__(self, steps: list[tuple[int, int, Any]], reads: list[Any]) -> None:
        self._steps = steps
        """(step before, or -1 for an output; edge, or number of the output; class) of each node."""
        self._reads = reads
        """(step, attribute, place in it, view) of each view."""

    def follow(self, outputs: Sequence[torch.Tensor]) -> list[tuple[Any, SavedView]]:
        """Return the views in another graph, or nothing if that graph is different."""
        nodes: list[Any] = []
        found = []
        try:
            for before, edge, kind in self._steps:
                node = outputs[edge].grad_fn if before < 0 else nodes[before].next_functions[edge][0]
                if type(node) is not kind:
                    return []
                nodes.append(node)
            for step, name, place, view in self._reads:
                saved = getattr(nodes[step], name)
                raw = saved if place < 0 else saved[place]
                if raw is None or not view.matches(raw):
                    return []
                found.append((raw, view))
        except IndexError:
            return []
        return found


@functools.cache
def _saved_attributes(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _extent(segment: FlatSegment) -> tuple[int, int, FlatSegment]:
    """Return (first address, address behind the last element, segment) of a full form."""
    start = segment.full.data_ptr()
    return start, start + segment.full.nbytes, segment


def _view_of(tensor: torch.Tensor, place: int, segment: FlatSegment) -> SavedView | None:
    """Return a tensor that begins `place` bytes into the full form as a view of it."""
    full = segment.full
    # Other layouts and wrappers of tensors, including those of `torch.func`, keep bytes in their own way.
    if (
        (type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor))
        or tensor.layout is not torch.strided
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        # A place says nothing about a pending conjugation.
        or (full.dtype.is_complex and (tensor.is_conj() or tensor.is_neg()))
    ):
        return None
    row = bisect_right(segment.starts, place // full.itemsize) - 1
    return SavedView(segment, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, row)
