"""What a trace shows that the plan does not: values widened and rounded again, pins that a model casts,
parameters computed with in another dtype than planned, operations that torch refuses.

Invariant: pure. Everything is told from the operations and the plan, nothing from a name.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerodrift.dtypes import DType
from zerodrift.observer.compare import verdict
from zerodrift.observer.operations import CASTS
from zerodrift.plan.table import Plan
from zerodrift.plan.traced import Hidden, Trace, TracedOperation, TracedTensor


def hidden(plan: Plan, trace: Trace) -> list[Hidden]:
    """Everything, the worst first."""
    forward = [operation for operation in trace.operations if not operation.backward]
    return [
        *_refused(trace),
        *_pin_casts(plan, trace, forward),
        *_promotions(forward),
        *_computes(plan, trace, forward),
    ]


def computes(trace: Trace) -> dict[str, dict[str, TracedOperation]]:
    """Parameter -> dtype -> the first operation of the forward that it enters in it, which is no cast."""
    owners = dict(trace.parameters)
    seen: dict[str, dict[str, TracedOperation]] = {}
    for operation in trace.operations:
        if operation.backward:
            continue
        for tensor in _read(operation):
            owner = owners.get(tensor.memory)
            if owner is None or not is_floating(tensor.dtype):
                continue
            if operation.name in CASTS:
                owners[operation.outputs[0].memory] = owner
            else:
                seen.setdefault(owner, {}).setdefault(tensor.dtype, operation)
    return seen


def is_floating(dtype: str) -> bool:
    known = _known(dtype)
    return dtype.startswith("complex") or (known is not None and known.is_floating)


def _known(dtype: str) -> DType | None:
    try:
        return DType(dtype)
    except ValueError:
        return None


def _loses(source: str, target: str) -> bool:
    """Whether a cast loses anything of floating values."""
    one, other = _known(source), _known(target)
    floating = one is not None and other is not None and one.is_floating and other.is_floating
    return floating and not other.holds(one)  # type: ignore[union-attr, arg-type]


def _read(operation: TracedOperation) -> tuple[TracedTensor, ...]:
    """The inputs that are computed with; what is overwritten is not."""
    return operation.inputs[1:] if operation.name == "copy_" else operation.inputs


# --- one kind each ------------------------------------------------------------------------------------


def _refused(trace: Trace) -> Iterator[Hidden]:
    refused = trace.refused
    if refused is None:
        return
    where = "the backward of `{}`" if refused.backward else "`{}`"
    what = f"torch refuses {where.format(refused.name)} of {' and '.join(refused.inputs)}: {refused.said}"
    do = "The step ends there, and so does this trace. Cast one of them, or pin the module that makes it."
    yield Hidden("refused", refused.module, what, refused.line, do)


def _pin_casts(plan: Plan, trace: Trace, forward: list[TracedOperation]) -> Iterator[Hidden]:
    """A pinned parameter, or what its module keeps in the pin's dtype, that is rounded before it is used."""
    rows = {memory: plan.row(name) for memory, name in trace.parameters.items()}
    pinned = {memory: row.name for memory, row in rows.items() if row is not None and row.columns.pinned}
    kept = dict(trace.kept)
    for operation in forward:
        if operation.name not in CASTS or not operation.outputs:
            continue
        (given, *_), (made, *_) = operation.inputs, operation.outputs
        for held, subject in ((pinned, ""), (kept, "what it returns unrounded, as the plan says, is ")):
            name = held.get(given.memory)
            if name is None:
                continue
            if _loses(given.dtype, made.dtype):
                what = f"{subject}cast from {given.dtype} to {made.dtype} by {operation.cast_by}"
                do = "Its pin ends there, whatever the plan says: mend the model's code."
                if operation.cast_by != "the model":
                    do = "Pin what takes it, too, if it is to stay unrounded."
                yield Hidden("pin cast", name, what, operation.line, do)
            else:
                held[made.memory] = name


def _promotions(forward: list[TracedOperation]) -> Iterator[Hidden]:
    """Values that an operation widened because of what they met, and that were rounded later."""
    origins: dict[int, TracedOperation] = {}
    """Memory of a widened tensor -> the operation that widened it, or what it was made of."""
    told: set[int] = set()
    """Of what was rounded: once says it."""
    for operation in forward:
        inputs = [tensor for tensor in _read(operation) if is_floating(tensor.dtype)]
        wide = next((tensor for tensor in inputs if tensor.memory in origins), None)
        for made in operation.outputs:
            origin = origins.get(wide.memory) if wide is not None else None
            if origin is not None and wide is not None and _loses(wide.dtype, made.dtype):
                asked = operation.cast_by not in ("", "torch") or _in_place(operation)
                if asked and id(origin) not in told:
                    told.add(id(origin))
                    yield _promotion(origin, operation)
                origins.pop(made.memory, None)
            elif operation.cast_by or operation.name in CASTS:
                if origin is not None:
                    origins[made.memory] = origin
            elif _widened(inputs, made):
                origins[made.memory] = operation
            elif _in_place(operation) and any(t.dims and _loses(t.dtype, made.dtype) for t in inputs):
                yield _promotion(operation, operation)
            elif origin is not None and made.dtype == origin.outputs[0].dtype:
                origins[made.memory] = origin
            else:
                origins.pop(made.memory, None)


def _in_place(operation: TracedOperation) -> bool:
    first = [tensor.memory for tensor in operation.inputs[:1]]
    return operation.name.endswith("_") and first == [tensor.memory for tensor in operation.outputs[:1]]


def _widened(inputs: list[TracedTensor], made: TracedTensor) -> bool:
    """Whether an output is wider than an input that is more than a number, and another input made it so."""
    counted = [tensor.dtype for tensor in inputs if tensor.dims] or [tensor.dtype for tensor in inputs]
    mixed = len({tensor.dtype for tensor in inputs}) > 1
    return mixed and any(_loses(made.dtype, dtype) for dtype in counted)


def _promotion(origin: TracedOperation, cast: TracedOperation) -> Hidden:
    given = dict.fromkeys(tensor.dtype for tensor in origin.inputs if is_floating(tensor.dtype))
    what = f"`{origin.name.strip('_')}` of {' and '.join(given)} "
    if origin is cast:
        what += f"is rounded to {cast.outputs[0].dtype} in place"
    else:
        by = cast.cast_by or f"`{cast.name}`"
        what += f"makes {origin.outputs[0].dtype}, rounded to {cast.outputs[0].dtype} by {by}"
        told = cast.line not in ("", origin.line) and by != "autocast"  # which does so at whatever comes next
        what += f" at {cast.line}" if told else ""
    do = "In between it has the size of the wider dtype. Cast one of them, unless that is meant."
    if cast.cast_by == "autocast":
        do = "This is how autocast works. In mode bf16 or fp16 nothing is widened unasked."
    return Hidden("promotion", origin.module, what, origin.line, do)


def _computes(plan: Plan, trace: Trace, forward: list[TracedOperation]) -> Iterator[Hidden]:
    """Parameters that enter operations in another dtype than planned, or none at all."""
    seen = computes(trace)
    for row in plan.rows:
        if not row.columns.compute.is_floating:
            continue
        used = seen.get(row.name, {})
        planned = str(row.columns.compute)
        if not used and trace.refused is None and row.trained:
            do = "It gets no gradient. Freeze it, if that is meant."
            yield Hidden("unused", row.name, "enters no operation of the forward", "", do)
        names = frozenset(str(DType(dtype).torch).removeprefix("torch.") for dtype in used if _known(dtype))
        judged = verdict(plan, row.columns, "compute", names)
        if judged not in ("wider", "DIFFERENT"):
            continue
        for dtype, operation in used.items():
            if dtype == planned:
                continue
            loses = _loses(planned, dtype)
            what = f"used in {dtype} by `{operation.name.strip('_')}`, for {planned} in the plan"
            do = (
                "The model's own code rounds it: change that, or what the plan says."
                if loses
                else "The model's own code widens it: nothing is lost."
            )
            yield Hidden("compute", row.name, what, operation.line, do)
