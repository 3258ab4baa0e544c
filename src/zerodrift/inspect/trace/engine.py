"""Observe zerodrift's engine in a step: the dtypes that the tensors of every column really have.

    with observe(engine) as seen:
        engine.backward(engine(**batch).loss)
        engine.step()
    findings = compare.findings(engine.plan, seen)

Columns are as in `watch.py`, with two exceptions: `grad` is the gradient that an operation's backward
returns, before autograd casts it, and `accumulate` is the tensor that the update reads.

Invariant: every cell is a tensor's dtype or a recorded call, which the plan only attributes to parameters.
Observing changes no value, and every hook is gone when the context ends.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerodrift.comm import Recorded
from zerodrift.engine import Engine, FlatSegment, native, tensors_in, trained_of
from zerodrift.inspect.trace.operations import CASTS, VIEWS, every_operation, name_of
from zerodrift.inspect.trace.parameter import Owners
from zerodrift.inspect.trace.records import Column, EngineRecord, column_word, dtype_name
from zerodrift.inspect.trace.state import Patches
from zerodrift.plan import collectives


@contextlib.contextmanager
def observe(engine: Engine, operations: bool = True) -> Iterator[EngineRecord]:
    """Record one optimizer step. The record is complete when the context has ended.

    `operations=False` leaves `compute` and `grad` empty, as compiled code requires. A pipeline's rank
    observes its own pieces. Weight gradients that a schedule delays are formed in the dtype of accumulation,
    and have no `grad`.
    """
    with observe_calls(engine, operations) as (seen, calls), calls():
        yield seen


@contextlib.contextmanager
def observe_calls(
    engine: Engine, operations: bool = True
) -> Iterator[tuple[EngineRecord, Callable[[], contextlib.AbstractContextManager[Any]]]]:
    """Record in a caller's loop, which may leave contexts in any order.

    The second value returns a context for one call of the engine, in which `compute` and `grad` are seen.
    """
    seen = EngineRecord()
    is_native = engine.plan.policy.backend == "native"
    subject = _NativeTensors(engine) if is_native else _FullyShardTensors(engine)
    recorder = _StepOperations(subject.owners, subject.trained, seen)

    def after(module: Any, args: Any, output: Any) -> None:
        outputs = [] if output is None else tensors_in(output)
        if module is engine.module:  # a piece of a model returns no logits
            logits = getattr(output, "logits", None)
            results = [logits] if isinstance(logits, torch.Tensor) else [t for t in outputs if t.dim()]
            seen.logits |= {dtype_name(tensor.dtype) for tensor in results if tensor.is_floating_point()}
        if operations:
            recorder.ends(outputs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(subject.watching(seen))
        for module in subject.forwards:
            stack.callback(module.register_forward_pre_hook(recorder.begins).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield seen, (lambda: every_operation(recorder.called)) if operations else contextlib.nullcontext
    subject.see_resting(seen)


class _StepOperations:
    """The dtypes of parameters in the operations of a forward, and the casts of gradients in a backward."""

    def __init__(self, owners: Owners[str], names: Mapping[int, str], seen: EngineRecord) -> None:
        self._owners, self._names, self._seen = owners, names, seen
        self._is_forward = False
        self._casts: dict[int, tuple[StorageWeakRef, str]] | None = None
        """Storage of a cast -> dtype of its input, while a node that returns a parameter's gradient runs."""

    def begins(self, module: Any, args: Any) -> None:
        self._is_forward = True

    def ends(self, outputs: list[torch.Tensor]) -> None:
        """Hook on every node that returns a parameter's gradient. The hooks are freed with the graph."""
        self._is_forward = False
        waiting: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        visited = set(waiting)
        while waiting:
            node = waiting.pop()
            owners: dict[int, tuple[str, str]] = {}
            for place, (following, _) in enumerate(node.next_functions):
                variable = getattr(following, "variable", None)
                if variable is not None and id(variable) in self._names:
                    owners[place] = (self._names[id(variable)], dtype_name(variable.dtype))
                if following is not None and following not in visited:
                    visited.add(following)
                    waiting.append(following)
            if owners:
                self._hook(node, owners)

    def _hook(self, node: Any, owners: dict[int, tuple[str, str]]) -> None:
        """Record a node's gradients of its parameters, each with its name and its own dtype.

        When the second hook runs, autograd may have cast the gradient to the parameter's `grad_dtype`: the
        node returned the input of that cast. The backward of a cast in the model casts as well, to the
        parameter's dtype, and that cast is not autograd's.
        """
        casts_itself = node.name().startswith("ToCopyBackward")

        def before(arriving: Any) -> None:
            self._casts = {}

        def after(leaving: tuple[torch.Tensor | None, ...], arriving: Any) -> None:
            casts, self._casts = self._casts or {}, None
            for place, (owner, own) in owners.items():
                gradient = leaving[place]
                if gradient is not None:
                    held = casts.get(gradient.untyped_storage()._cdata)
                    source = held[1] if held is not None and not held[0].expired() else ""
                    by_autograd = source and not (casts_itself and source != own)
                    self._seen.add(owner, "grad", source if by_autograd else dtype_name(gradient.dtype))

        node.register_prehook(before)
        node.register_hook(after)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        if func.namespace != "aten" or not (self._is_forward or self._casts is not None):
            return
        operation = name_of(func)
        if self._casts is not None:
            if operation == "_to_copy":
                storage = out.untyped_storage()
                self._casts[storage._cdata] = (StorageWeakRef(storage), dtype_name(args[0].dtype))
            return
        if operation in VIEWS:
            return
        # `copy_` does not compute with the tensor that it overwrites: gathers use it, too.
        for tensor in tensors_in((args[1:] if operation == "copy_" else args, kwargs)):
            # Integers are the bits of a parameter, or packed values.
            is_floating = tensor.is_floating_point() or tensor.is_complex()
            owner = self._owners.of(tensor) if is_floating else None
            if owner is None:
                continue
            if operation not in CASTS:
                self._seen.add(owner, "compute", dtype_name(tensor.dtype))
            if operation in CASTS or (_is_still(tensor, out) and self._owners.of(out) is None):
                self._owners.put(out, owner)


def _is_still(parameter: torch.Tensor, out: Any) -> bool:
    """Return True if a result equals the parameter, as `w * 1` does."""
    if not isinstance(out, torch.Tensor) or not out.is_floating_point() or out.numel() != parameter.numel():
        return False
    return torch.equal(out.reshape(-1).double(), parameter.reshape(-1).double())


def _wire(call: Recorded) -> str:
    """Return a reduction's dtypes: `wire>sum`, or one name if they agree."""
    wire, total = column_word(call.dtype), column_word(call.sum or call.dtype)
    return wire if wire == total else f"{wire}>{total}"


_REDUCES = {"shard": "reduce_scatter", "expert_shard": "reduce_scatter", "replicate": "all_reduce"}


class _NativeTensors:
    """The tensors of an engine of the native backend: its segments."""

    def __init__(self, engine: Engine) -> None:
        self._engine, executor = engine, native(engine.executor)
        self._segments: Sequence[FlatSegment] = executor.segments
        self.forwards: Sequence[torch.nn.Module] = executor.forwards
        # A pipeline's stage may know a parameter by another name than the plan.
        rows = {row.name: engine.plan.row(row.name) for row in engine.part.rows}
        self._names = {known: row.name for known, row in rows.items() if row is not None}
        self.owners: Owners[str] = Owners()
        for segment in self._segments:
            storage = segment.full.untyped_storage()
            for row in segment.rows:
                end = row.offset + max(row.numel, 1)
                self.owners.put_range(storage, row.offset, end, self._names[row.name])
        self.trained = {
            id(parameter): self._names[row.name]
            for segment in trained_of(self._segments)
            for row, parameter in zip(segment.rows, segment.parameters, strict=True)
        }

    def _add(self, seen: EngineRecord, segment: FlatSegment, column: Column, dtype: str) -> None:
        for row in segment.rows:
            seen.add(self._names[row.name], column, dtype)

    @contextlib.contextmanager
    def watching(self, seen: EngineRecord) -> Iterator[None]:
        """Record the flat gradients that the update reads, and the collectives."""

        def update(original: Callable[..., Any], gradients: Mapping[int, torch.Tensor], *rest: Any) -> None:
            for number, flat in gradients.items():
                self._add(seen, self._segments[number], "accumulate", dtype_name(flat.dtype))
            original(gradients, *rest)

        with self._engine.comm.record() as log, Patches() as patches:
            patches.replace(self._engine.updater, "update", update)
            yield
        self._see_sent(seen, log)

    def see_resting(self, seen: EngineRecord) -> None:
        updater = self._engine.updater
        for segment in self._segments:
            packed = None if segment.packed is None else segment.packed.dtype.value
            self._add(seen, segment, "storage", packed or dtype_name(segment.storage.dtype))
        for segment in () if updater is None else trained_of(self._segments):
            master, moments = updater.resting(segment.number)  # type: ignore[union-attr]
            held, is_bf16 = "same", segment.storage.dtype is torch.bfloat16
            if master is not None:
                is_split = is_bf16 and master.itemsize == 2 and not master.is_floating_point
                held = "split" if is_split else dtype_name(master)
            self._add(seen, segment, "master", held)
            for dtype in moments:
                self._add(seen, segment, "state", dtype_name(dtype))

    def _see_sent(self, seen: EngineRecord, log: list[Recorded]) -> None:
        """Attribute recorded calls to segments.

        Reductions come in the plan's order and are matched by number. Gathers, and the reductions of a
        pipeline, come in any order and are matched by size: calls whose size fits several segments count for
        each of them.
        """
        engine, segments = self._engine, self._segments
        planned = list(collectives(engine.plan, engine.mesh.rank("pipeline")))
        for axis, op in _REDUCES.items():
            calls = [call for call in log if call.op == op and call.axis == axis and call.dtype.is_floating]
            reductions = [call for call in planned if call.purpose in ("reduce", "replicate")]
            wanted = [call for call in reductions if call.axis == axis]
            is_ordered = engine.plan.policy.pipeline is None
            pairs = zip(calls, wanted, strict=False) if is_ordered else itertools.product(calls, wanted)
            for call, like in pairs:
                if call.numel == like.numel:
                    self._add(seen, segments[like.segment], "reduce", _wire(call))
        gathers = [call for call in planned if call.purpose in ("forward", "backward")]
        for numel in {call.numel for call in gathers}:
            fitting = {call.segment: call.dtype for call in gathers if call.numel == numel}
            dtypes = {call.dtype for call in log if call.op == "all_gather" and call.numel == numel}
            for number, dtype in fitting.items():
                for sent in {dtype} if dtypes == set(fitting.values()) else dtypes:
                    self._add(seen, segments[number], "gather", column_word(sent))


class _FullyShardTensors:
    """The tensors of an engine of backend fsdp2: its groups, each of which records its own collectives."""

    def __init__(self, engine: Engine) -> None:
        from zerodrift.backends import fully_sharded  # torch's FSDP takes a while to import

        self._executor = fully_sharded(engine.executor)
        self._members = tuple(self._executor.members.values())
        self._trained = [member for member in self._members if member.row.trained]
        self.forwards: Sequence[torch.nn.Module] = self._executor.forwards
        self.trained = {id(member.full): member.row.name for member in self._trained}
        self.owners: Owners[str] = Owners()
        for member in self._members:
            self.owners.put(member.full, member.row.name)

    @contextlib.contextmanager
    def watching(self, seen: EngineRecord) -> Iterator[None]:
        """Record the gradients that autograd adds to, those that the update reads, and the collectives."""

        def added(parameter: Any) -> None:
            if parameter.grad is not None:
                seen.add(self.trained[id(parameter)], "accumulate", dtype_name(parameter.grad.dtype))

        def step(original: Callable[..., Any], multiplier: float) -> None:
            for member in self._members:
                update = member.row.columns.update
                if update is not None and update.reduce.when == "every":
                    seen.add(member.row.name, "accumulate", dtype_name(member.gradient().dtype))
            original(multiplier)

        with Patches() as patches:
            for member in self._trained:
                patches.callback(member.full.register_post_accumulate_grad_hook(added).remove)
            groups = self._executor.units
            logs = [(group, patches.enter_context(group.collectives.record())) for group in groups]
            patches.replace(self._executor.updater, "step", step)
            yield
        for group, log in logs:
            for call in log:
                # torch packs a group of several dtypes as bytes, which say nothing of any of them.
                if call.op != "all_gather":
                    for member in group.trained:
                        seen.add(member.row.name, "reduce", _wire(call))
                elif call.dtype.torch is not torch.uint8:
                    for member in group.members:
                        seen.add(member.row.name, "gather", dtype_name(call.dtype.torch))

    def see_resting(self, seen: EngineRecord) -> None:
        updater = self._executor.updater
        for member in self._members:
            seen.add(member.row.name, "storage", dtype_name(member.storage().dtype))
        for member in () if updater is None else self._trained:
            seen.add(member.row.name, "master", "same")  # torch's optimizers update storage itself
            for moment in updater.moments(member.row.name).values():  # type: ignore[union-attr]
                seen.add(member.row.name, "state", dtype_name(moment.dtype))
