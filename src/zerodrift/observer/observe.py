"""Looks at an engine while it takes a step: which dtype every tensor of every column really has.

    with observe(engine) as seen:
        engine.backward(engine(**batch).loss)
        engine.step()
    findings = compare(engine.plan, seen, engine.mesh.rank())

A column is looked at where it is a tensor or a call, never in a config:

    storage     what rests between steps, after the step
    gather      the all-gathers that were issued
    compute     what enters the first operation that is no view and no cast, in the forward
    grad        what the backward of that operation returns, before autograd casts it to be added
    accumulate  the tensor that micro-batches are added in
    reduce      the reduce-scatters and all-reduces that were issued, and what they sum in
    master      what the updater holds beyond storage
    state       the moments that the updater holds

Forward and backward are watched here, alike on every backend. Where a backend keeps the other columns is
known by its `ObservedEngine`: `segments.py` for the native one, `tensors.py` for `fully_shard`.

Invariant: looking changes nothing. Every hook is gone when the context ends, however it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerodrift.engine.engine import Engine
from zerodrift.engine.nested import tensors_in
from zerodrift.observer.observed import Observed, name
from zerodrift.observer.operations import CASTS, VIEWS, every_operation
from zerodrift.observer.segments import Segments


class ObservedEngine(Protocol):
    """An engine, as far as it can be looked at."""

    def parameter_of(self, tensor: torch.Tensor) -> str | None:
        """The parameter that this is a view of, in the form that modules compute with."""

    def forwards(self) -> Sequence[torch.nn.Module]:
        """The modules whose forwards are the model's: itself, or the pieces that a pipeline runs."""

    def trained(self) -> Mapping[int, str]:
        """By the id of the tensor that autograd adds a gradient to, the parameter's name."""

    def watching(self, seen: Observed) -> contextlib.AbstractContextManager[None]:
        """See what is added, sent and updated inside."""

    def resting(self, seen: Observed) -> None:
        """See what is there between steps."""


@contextlib.contextmanager
def observe(engine: Engine, operations: bool = True) -> Iterator[Observed]:
    """What is seen until the context ends; complete when it has. One optimizer step belongs inside.

    `operations=False` leaves `compute` and `grad` unseen: what compiled code does inside cannot be watched.
    Of a pipeline it is this rank's pieces that are observed; weight gradients that wait in a queue are
    formed in the dtype of accumulation, and their `grad` is not seen.
    """
    with observe_calls(engine, operations) as (seen, calls), calls():
        yield seen


@contextlib.contextmanager
def observe_calls(
    engine: Engine, operations: bool = True
) -> Iterator[tuple[Observed, Callable[[], contextlib.AbstractContextManager[Any]]]]:
    """The same in a loop that is somebody else's: `compute` and `grad` are seen inside of what the second
    value makes, around each call of the engine, for what is entered between them may be left in any order."""
    subject = _subject(engine)
    seen = Observed()
    told = _Operations(_ParameterLookup(subject), seen) if operations else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(subject.watching(seen))
        for module in subject.forwards():
            watch = _Watch(module, module is engine.module, subject.trained(), seen, told)
            stack.callback(watch.leave)
        yield seen, contextlib.nullcontext if told is None else lambda: every_operation(told.called)
    subject.resting(seen)


def _subject(engine: Any) -> ObservedEngine:
    if engine.plan.policy.backend == "native":
        return Segments(engine)
    from zerodrift.observer.tensors import Tensors  # torch's FSDP takes a while to import

    return Tensors(engine)


# --- who a tensor belongs to --------------------------------------------------------------------------


class _ParameterLookup:
    """From a tensor to the parameter that it is a view of, or a cast of."""

    def __init__(self, subject: ObservedEngine) -> None:
        self._subject = subject
        self._casts: dict[int, tuple[StorageWeakRef, str]] = {}

    def of(self, tensor: torch.Tensor) -> str | None:
        """The parameter's name."""
        own = self._subject.parameter_of(tensor)
        if own is not None:
            return own
        cast = self._casts.get(tensor.untyped_storage()._cdata)
        if cast is None or cast[0].expired():
            return None
        return cast[1]

    def cast(self, tensor: torch.Tensor, owner: str) -> None:
        """`tensor` is a cast of that parameter, as long as it lives."""
        storage = tensor.untyped_storage()
        self._casts[storage._cdata] = (StorageWeakRef(storage), owner)


# --- forward and backward -----------------------------------------------------------------------------


class _Operations:
    """Told of every operation: in a forward, in which dtype parameters enter them; in a backward, which
    gradients were cast, and from what."""

    def __init__(self, owners: _ParameterLookup, seen: Observed) -> None:
        self._owners, self._seen = owners, seen
        self.forward = False
        """Whether a forward of the engine's model is under way."""
        self.casts: dict[int, tuple[StorageWeakRef, str]] | None = None
        """While a node of the backward runs that serves a parameter: storage of a cast -> its source."""

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        if func.namespace != "aten" or not (self.forward or self.casts is not None):
            return
        operation = func.overloadpacket.__name__
        if self.casts is not None:
            if operation == "_to_copy":
                storage = out.untyped_storage()
                self.casts[storage._cdata] = (StorageWeakRef(storage), name(args[0].dtype))
        elif operation not in VIEWS:
            self._forward(operation, args, kwargs, out)

    def _forward(self, operation: str, args: Any, kwargs: Any, out: Any) -> None:
        if operation == "copy_":
            args = args[1:]  # what is overwritten is not computed with: so does a gather
        for tensor in tensors_in((args, kwargs)):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue  # a parameter's bits, or what is unpacked before it is used
            owner = self._owners.of(tensor)
            if owner is None:
                continue
            if operation in CASTS:
                self._owners.cast(out, owner)
            else:
                self._seen.see(owner, "compute", name(tensor.dtype))
                if _is_still(tensor, out):
                    self._owners.cast(out, owner)


def _is_still(parameter: torch.Tensor, out: Any) -> bool:
    """Whether what an operation returned is the parameter, as `w * 1` is: what becomes of it counts."""
    if not isinstance(out, torch.Tensor) or not out.is_floating_point() or out.numel() != parameter.numel():
        return False
    return torch.equal(out.reshape(-1).double(), parameter.reshape(-1).double())


class _Watch:
    """Hooks on the engine's model: when its forward runs, what it returns, and the graph behind that."""

    def __init__(
        self,
        module: torch.nn.Module,
        is_model: bool,
        names: Mapping[int, str],
        seen: Observed,
        operations: _Operations | None,
    ) -> None:
        self._seen, self._operations, self._names = seen, operations, names
        self._is_model = is_model
        """Whether it is the model: what leaves a piece of one is no logits."""
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
        outputs = tensors_in(output)
        floating = [tensor for tensor in outputs if tensor.is_floating_point() and tensor.dim()]
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor):
            floating = [logits]
        if self._is_model:
            self._seen.logits |= {name(tensor.dtype) for tensor in floating}
        if self._operations is not None:
            roots = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
            _watch_graph(roots, self._names, self._seen, self._operations)

    def leave(self) -> None:
        for handle in self.handles:
            handle.remove()


def _watch_graph(roots: list[Any], names: Mapping[int, str], seen: Observed, operations: _Operations) -> None:
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
