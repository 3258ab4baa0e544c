"""Findings about a dry run that the plan does not show: hidden casts, and sums that differ each time.

Invariant: pure. Every finding follows from the operations and the plan, none from a name.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerodrift.dtypes import DType
from zerodrift.inspect.check.compare import verdict
from zerodrift.inspect.trace import CASTS, dtype_name
from zerodrift.plan import Hidden, Plan, Trace, TracedOperation, TracedTensor
from zerodrift.policy import SILENT, need_of, remedy


def hidden(plan: Plan, trace: Trace) -> list[Hidden]:
    forward = [operation for operation in trace.operations if not operation.backward]
    found: list[Hidden] = []
    if trace.refused is not None:
        refused = trace.refused
        where = f"the backward of `{refused.name}`" if refused.backward else f"`{refused.name}`"
        what = f"torch refuses {where} of {' and '.join(refused.inputs)}: {refused.said}"
        do = "The step ends there, and so does this trace. Cast one of them, or pin the module that makes it."
        found.append(Hidden("refused", refused.module, what, refused.line, do))
    return [*found, *_pin_casts(plan, trace, forward), *_promotions(forward), *_other_computes(plan, trace)]


def computes(trace: Trace) -> dict[str, dict[str, TracedOperation]]:
    """Map parameter -> dtype -> the first operation of the forward, not a cast, in this dtype."""
    owners = dict(trace.parameters)
    seen: dict[str, dict[str, TracedOperation]] = {}
    for operation in trace.operations:
        for tensor in () if operation.backward else _read(operation):
            owner = owners.get(tensor.memory)
            if owner is None or not _is_floating(tensor.dtype):
                continue
            if operation.name in CASTS:
                owners[operation.outputs[0].memory] = owner
            else:
                seen.setdefault(owner, {}).setdefault(tensor.dtype, operation)
    return seen


_KNOWN = {str(dtype): dtype for dtype in DType}


def _is_floating(dtype: str) -> bool:
    known = _KNOWN.get(dtype)
    return dtype.startswith("complex") or (known is not None and known.is_floating)


def _loses(source: str, target: str) -> bool:
    """Return True if a cast between floating dtypes can change a value."""
    one, other = _KNOWN.get(source), _KNOWN.get(target)
    if one is None or other is None:
        return False
    return one.is_floating and other.is_floating and not other.holds(one)


def _read(operation: TracedOperation) -> tuple[TracedTensor, ...]:
    """Return the inputs that are computed with, not the one that is overwritten."""
    return operation.inputs[1:] if operation.name == "copy_" else operation.inputs


def _pin_casts(plan: Plan, trace: Trace, forward: list[TracedOperation]) -> Iterator[Hidden]:
    """Find a pinned parameter, or a kept output of its module, that is rounded before it is used."""
    rows = {memory: plan.row(name) for memory, name in trace.parameters.items()}
    pinned = {memory: row.name for memory, row in rows.items() if row is not None and row.columns.pinned}
    kept = dict(trace.kept)
    for operation in forward:
        if operation.name not in CASTS or not operation.outputs:
            continue
        given, made = operation.inputs[0], operation.outputs[0]
        for held, subject in ((pinned, ""), (kept, "what it returns unrounded, as the plan says, is ")):
            name = held.get(given.memory)
            if name is None:
                continue
            if not _loses(given.dtype, made.dtype):
                held[made.memory] = name
                continue
            what = f"{subject}cast from {given.dtype} to {made.dtype} by {operation.cast_by}"
            do = "Its pin ends there, whatever the plan says: mend the model's code."
            if operation.cast_by != "the model":
                do = "Pin what takes it, too, if it is to stay unrounded."
            yield Hidden("pin cast", name, what, operation.line, do)


def _promotions(forward: list[TracedOperation]) -> Iterator[Hidden]:
    """Find values that an operation widened because of its other operand, and that were rounded later."""
    origins: dict[int, TracedOperation] = {}
    """Memory of a widened tensor -> the operation that widened it, or its source."""
    reported: set[int] = set()
    for operation in forward:
        inputs = [tensor for tensor in _read(operation) if _is_floating(tensor.dtype)]
        wide = next((tensor for tensor in inputs if tensor.memory in origins), None)
        origin = None if wide is None else origins[wide.memory]
        is_cast = bool(operation.cast_by) or operation.name in CASTS
        for made in operation.outputs:
            if wide is not None and origin is not None and _loses(wide.dtype, made.dtype):
                is_asked = operation.cast_by not in ("", "torch") or _is_in_place(operation)
                if is_asked and id(origin) not in reported:
                    reported.add(id(origin))
                    yield _promotion(origin, operation)
                origins.pop(made.memory, None)
            elif is_cast:
                if origin is not None:
                    origins[made.memory] = origin
            elif _is_widened(inputs, made):
                origins[made.memory] = operation
            elif _is_in_place(operation) and any(t.dims and _loses(t.dtype, made.dtype) for t in inputs):
                yield _promotion(operation, operation)
            elif origin is not None and made.dtype == origin.outputs[0].dtype:
                origins[made.memory] = origin
            else:
                origins.pop(made.memory, None)


def _is_in_place(operation: TracedOperation) -> bool:
    first = [tensor.memory for tensor in operation.inputs[:1]]
    return operation.name.endswith("_") and first == [tensor.memory for tensor in operation.outputs[:1]]


def _is_widened(inputs: list[TracedTensor], made: TracedTensor) -> bool:
    counted = [tensor.dtype for tensor in inputs if tensor.dims] or [tensor.dtype for tensor in inputs]
    is_mixed = len({tensor.dtype for tensor in inputs}) > 1
    return is_mixed and any(_loses(made.dtype, dtype) for dtype in counted)


def _promotion(origin: TracedOperation, cast: TracedOperation) -> Hidden:
    given = dict.fromkeys(tensor.dtype for tensor in origin.inputs if _is_floating(tensor.dtype))
    what = f"`{origin.name.strip('_')}` of {' and '.join(given)} "
    if origin is cast:
        what += f"is rounded to {cast.outputs[0].dtype} in place"
    else:
        by = cast.cast_by or f"`{cast.name}`"
        what += f"makes {origin.outputs[0].dtype}, rounded to {cast.outputs[0].dtype} by {by}"
        if cast.line not in ("", origin.line) and by != "autocast":  # which casts at the next operation
            what += f" at {cast.line}"
    do = "In between it has the size of the wider dtype. Cast one of them, unless that is meant."
    if cast.cast_by == "autocast":
        do = "This is how autocast works. In mode bf16 or fp16 nothing is widened unasked."
    return Hidden("promotion", origin.module, what, origin.line, do)


def _other_computes(plan: Plan, trace: Trace) -> Iterator[Hidden]:
    """Find parameters that enter operations in another dtype than planned, or no operation at all."""
    seen = computes(trace)
    for row in plan.rows:
        if not row.columns.compute.is_floating:
            continue
        used, planned = seen.get(row.name, {}), str(row.columns.compute)
        if not used and trace.refused is None and row.trained:
            do = "It gets no gradient. Freeze it, if that is meant."
            yield Hidden("unused", row.name, "enters no operation of the forward", "", do)
        names = frozenset(dtype_name(known.torch) for dtype in used if (known := _KNOWN.get(dtype)))
        if verdict(plan, row.columns, "compute", names) not in ("wider", "DIFFERENT"):
            continue
        for dtype, operation in used.items():
            if dtype == planned:
                continue
            what = f"used in {dtype} by `{operation.name.strip('_')}`, for {planned} in the plan"
            do = "The model's own code widens it: nothing is lost."
            if _loses(planned, dtype):
                do = "The model's own code rounds it: change that, or what the plan says."
            yield Hidden("compute", row.name, what, operation.line, do)


def nondeterministic(plan: Plan, trace: Trace, device: str, digest_every: int = 0) -> Iterator[Hidden]:
    """Yield the operations whose result on CUDA is not the same each time, each once per module, if the
    plan's order of sums or a run's digests ask for the same bits.

    `policy/order.py` has the table, and torch refuses the same operations when they run. Only running can
    tell which kernel attention takes; each has a deterministic form where the engine asks for it.
    """
    need = need_of(plan.policy.requires_tree, digest_every)
    if device != "cuda" or need is None:
        return
    casts = [each for each in trace.operations if each.name in CASTS]
    casts = [each for each in casts if all(tensor.dtype.startswith("int") for tensor in each.inputs)]
    # A CPU needs whole numbers as floating ones.
    whole = {output.memory for each in casts for output in each.outputs}
    named = set()
    for operation in trace.operations:
        name = operation.name.lstrip("_")
        instead = remedy(name)
        place = operation.module, name, operation.line
        if instead is None or place in named or _is_exempt(name, operation, whole):
            continue
        named.add(place)
        refused = f"and refused by torch under `{need.key}: {need.value}`"
        then = "which torch does not notice" if name in SILENT else refused
        what = f"the result of `{name}` on CUDA is not the same each time, {then}"
        yield Hidden("not deterministic", operation.module, what, operation.line, f"{instead}.")


def _is_exempt(name: str, operation: TracedOperation, whole: set[int]) -> bool:
    """Return True for a form of an operation that is the same each time."""
    given, made = operation.inputs, operation.outputs
    if name == "histc":
        return given[0].dtype.startswith("int") or given[0].memory in whole
    if name == "bincount":
        return len(given) == 1  # no weights
    if name in ("median", "nanmedian"):
        return len(made) == 1  # no indices
    if name == "embedding_bag_backward":
        return given[5].dims < 2  # no places of maxima
    if name == "scatter_reduce":
        return True  # torch refuses products, and a trace does not have this argument
    return name == "nll_loss2d_forward" and made[0].dims > 0  # not reduced
