"""Looks at an engine while it takes a step: which dtype every tensor of every column really has.

    with observe(engine) as seen:
        engine.backward(engine(**batch).loss)
        engine.step()
    findings = compare(engine.plan, seen, engine.mesh.rank())

A column is looked at where it is a tensor or a call, never in a config:

    storage     the segment's buffer, after the step
    gather      the all-gathers that were issued
    compute     what enters the first operation that is no view and no cast, in the forward
    grad        what the backward of that operation returns, before autograd casts it to be added
    accumulate  the flat gradient that the update reads
    reduce      the reduce-scatters and all-reduces that were issued, and what they sum in
    master      what the updater holds beyond storage
    state       the moments that the updater holds

Invariant: looking changes nothing. Every hook is gone when the context ends, however it ends.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zerodrift.audit.observed import Observed
from zerodrift.comm.collectives import Recorded
from zerodrift.engine.engine import Engine
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.unit import tensors_in
from zerodrift.errors import UnsupportedError
from zerodrift.plan.schedule import Collective, collectives
from zerodrift.plan.table import Plan


@contextlib.contextmanager
def observe(engine: Engine, operations: bool = True) -> Iterator[Observed]:
    """What is seen until the context ends; complete when it has. One optimizer step belongs inside.

    `operations=False` leaves `compute` and `grad` unseen: what compiled code does inside cannot be watched.
    """
    if engine.plan.policy.backend != "native":
        raise UnsupportedError(
            f"`observe`: can look at the native backend; got {engine.plan.policy.backend}. What it sends "
            f"is in `engine.comm.record()`."
        )
    seen = Observed()
    mode = _Operations(_Rows(engine), seen) if operations else None
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(engine.comm.record())
        stack.enter_context(_watching_update(engine, seen))
        stack.callback(_Watch(engine, seen, mode).leave)
        if mode is not None:
            stack.enter_context(mode)
        yield seen
    _resting(engine, seen)
    _sent(engine.plan, log, seen)


def name(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


# --- who a tensor belongs to --------------------------------------------------------------------------


class _Rows:
    """From a tensor to the parameter that it is a view of, or a cast of."""

    def __init__(self, engine: Engine) -> None:
        self._segments: dict[int, FlatSegment] = {}
        for segment in engine.segments:
            self._segments[segment.full.untyped_storage()._cdata] = segment
        self._starts = {s.number: [row.offset for row in s.rows] for s in engine.segments}
        self._casts: dict[int, tuple[StorageWeakRef, str]] = {}

    def of(self, tensor: torch.Tensor) -> str | None:
        """The parameter's name."""
        place = tensor.untyped_storage()._cdata
        segment = self._segments.get(place)
        if segment is not None:
            starts = self._starts[segment.number]
            number = bisect.bisect_right(starts, tensor.storage_offset()) - 1
            return segment.rows[number].name if number >= 0 else None
        found = self._casts.get(place)
        if found is None or found[0].expired():
            return None
        return found[1]

    def cast(self, tensor: torch.Tensor, owner: str) -> None:
        """`tensor` is a cast of that parameter, as long as it lives."""
        storage = tensor.untyped_storage()
        self._casts[storage._cdata] = (StorageWeakRef(storage), owner)


# --- forward and backward -----------------------------------------------------------------------------

_VIEWS = frozenset(
    [
        *("alias", "as_strided", "chunk", "contiguous", "detach", "expand", "lift_fresh", "permute"),
        *("reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"),
        *("unflatten", "unsqueeze", "view", "_reshape_alias", "_unsafe_view"),
    ]
)
_CASTS = frozenset(["_to_copy", "clone", "to"])


class _Operations(TorchDispatchMode):
    """Sees every operation below autograd and autocast: in a forward, in which dtype parameters enter them;
    in a backward, which gradients were cast, and from what."""

    def __init__(self, rows: _Rows, seen: Observed) -> None:
        super().__init__()
        self._rows, self._seen = rows, seen
        self.forward = False
        """Whether a forward of the engine's model is under way."""
        self.casts: dict[int, tuple[StorageWeakRef, str]] | None = None
        """While a node of the backward runs that serves a parameter: storage of a cast -> its source."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or not (self.forward or self.casts is not None):
            return out
        operation = func.overloadpacket.__name__
        if self.casts is not None:
            if operation == "_to_copy":
                storage = out.untyped_storage()
                self.casts[storage._cdata] = (StorageWeakRef(storage), name(args[0].dtype))
        elif operation not in _VIEWS:
            self._forward(operation, args, kwargs, out)
        return out

    def _forward(self, operation: str, args: Any, kwargs: Any, out: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            owner = self._rows.of(tensor)
            if owner is None:
                continue
            if operation in _CASTS:
                self._rows.cast(out, owner)
            else:
                self._seen.see(owner, "compute", name(tensor.dtype))


class _Watch:
    """Hooks on the engine's model: when its forward runs, what it returns, and the graph behind that."""

    def __init__(self, engine: Engine, seen: Observed, operations: _Operations | None) -> None:
        self._seen, self._operations = seen, operations
        self._names = {
            id(parameter): row.name
            for segment in engine.segments
            for row, parameter in zip(segment.rows, segment.parameters, strict=True)
            if segment.update is not None
        }
        module = engine.module
        self.handles = [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, module: Any, args: Any) -> None:
        if self._operations is not None:
            self._operations.forward = True

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if self._operations is not None:
            self._operations.forward = False
        if output is None:
            return
        found = list(tensors_in(output))
        floating = [tensor for tensor in found if tensor.is_floating_point() and tensor.dim()]
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor):
            floating = [logits]
        self._seen.logits |= {name(tensor.dtype) for tensor in floating}
        if self._operations is not None:
            roots = [tensor.grad_fn for tensor in found if tensor.grad_fn is not None]
            _watch_graph(roots, self._names, self._seen, self._operations)

    def leave(self) -> None:
        for handle in self.handles:
            handle.remove()


def _watch_graph(roots: list[Any], names: dict[int, str], seen: Observed, operations: _Operations) -> None:
    """Hooks on every node that hands a gradient to a parameter; they go with the graph."""
    visited, waiting = set(roots), list(roots)
    while waiting:
        node = waiting.pop()
        owners: dict[int, tuple[str, str]] = {}
        for place, (following, _) in enumerate(node.next_functions):
            if following is None:
                continue
            variable = getattr(following, "variable", None)
            if variable is not None and id(variable) in names:
                owners[place] = (names[id(variable)], name(variable.dtype))
            if following not in visited:
                visited.add(following)
                waiting.append(following)
        if owners:
            _hook(node, owners, seen, operations)


def _hook(node: Any, owners: dict[int, tuple[str, str]], seen: Observed, operations: _Operations) -> None:
    """Note what a node returns for its parameters, each with its name and its own dtype.

    When the second hook runs, autograd has already cast to the parameter's `grad_dtype`: what the node
    returned is the source of that cast, if there was one. The backward of a cast that the model made casts
    too, to the parameter's dtype, and that one is no loss of ours.
    """
    casts_itself = node.name().startswith("ToCopyBackward")

    def before(arriving: Any) -> None:
        operations.casts = {}

    def after(leaving: tuple[torch.Tensor | None, ...], arriving: Any) -> None:
        casts, operations.casts = operations.casts or {}, None
        for place, (owner, own) in owners.items():
            gradient = leaving[place]
            if gradient is None:
                continue
            held = casts.get(gradient.untyped_storage()._cdata)
            source = held[1] if held is not None and not held[0].expired() else ""
            by_autograd = source and not (casts_itself and source != own)
            seen.see(owner, "grad", source if by_autograd else name(gradient.dtype))

    node.register_prehook(before)
    node.register_hook(after)


# --- the step -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _watching_update(engine: Engine, seen: Observed) -> Iterator[None]:
    """Sees the gradients that the update reads."""
    updater = engine.updater
    if updater is None:
        yield
        return
    update = updater.update

    def watched(gradients: Any, multiplier: float) -> None:
        for number, flat in gradients.items():
            for row in engine.segments[number].rows:
                seen.see(row.name, "accumulate", name(flat.dtype))
        update(gradients, multiplier)

    updater.update = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        del updater.update


def _resting(engine: Engine, seen: Observed) -> None:
    """What is there between steps."""
    for segment in engine.segments:
        master: torch.dtype | None = None
        moments: tuple[torch.dtype, ...] = ()
        if segment.update is not None and engine.updater is not None:
            master, moments = engine.updater.resting(segment.number)
        for row in segment.rows:
            seen.see(row.name, "storage", name(segment.storage.dtype))
            if segment.update is None or engine.updater is None:
                continue
            seen.see(row.name, "master", _master(master, segment.storage.dtype))
            for dtype in moments:
                seen.see(row.name, "state", name(dtype))


def _master(held: torch.dtype | None, storage: torch.dtype) -> str:
    """The plan's word for what is held beyond storage."""
    if held is None:
        return "same"
    split = storage is torch.bfloat16 and held.itemsize == 2 and not held.is_floating_point
    return "split" if split else name(held)


# --- what was sent ------------------------------------------------------------------------------------


def _sent(plan: Plan, log: list[Recorded], seen: Observed) -> None:
    """Reductions come in the plan's order, so the nth is the plan's nth. Gathers come when they are needed
    and are told by their size: where it fits several segments, all gathers of that size stand for them."""
    planned = list(collectives(plan))
    for axis in ("shard", "replicate"):
        reductions = [each for each in log if each.op == _REDUCES[axis] and each.axis == axis]
        reductions = [each for each in reductions if each.dtype.is_floating]
        wanted = [each for each in planned if each.purpose in ("reduce", "replicate") and each.axis == axis]
        for call, like in zip(reductions, wanted, strict=False):
            if call.numel == like.numel:
                wire, total = name(call.dtype.torch), name((call.sum or call.dtype).torch)
                _see_rows(plan, like, seen, wire if wire == total else f"{wire}>{total}")
    gathers = [each for each in planned if each.purpose in ("forward", "backward")]
    for numel in {each.numel for each in gathers}:
        fitting = {each.segment: each.dtype for each in gathers if each.numel == numel}
        found = {call.dtype for call in log if call.op == "all_gather" and call.numel == numel}
        for segment, dtype in fitting.items():
            for what in {dtype} if found == set(fitting.values()) else found:
                for row in plan.segments[segment].rows:
                    seen.see(plan.rows[row].name, "gather", name(what.torch))


_REDUCES = {"shard": "reduce_scatter", "replicate": "all_reduce"}


def _see_rows(plan: Plan, like: Collective, seen: Observed, what: str) -> None:
    for row in plan.segments[like.segment].rows:
        seen.see(plan.rows[row].name, "reduce", what)
