"""Compare a declaration with a run: zerodrift's engine with its plan, any run with a file (`--expect`), a dry
run with its plan.

A cell that was not seen is no difference. A cell that was seen must be as declared, with three exceptions.
Under autocast an operation computes in one of two dtypes, unless a rule pins the parameter. A model's code
may compute wider than declared, as many norms do. Another library may keep its own defaults, so a config
binds only the columns that a key or the mode decides. A dry run also shows hidden casts, and sums whose
result is not the same each time.

Invariant: pure. A finding names the parameter, the column, both dtypes, and the reason in the plan. Findings
about a dry run follow from its operations, never from names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch

from zerodrift.config import Config, without_torch_classes
from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import ConfigError, PrecisionError, Problem
from zerodrift.inspect.check import table as tables
from zerodrift.inspect.check.table import Kind, RunFinding
from zerodrift.inspect.trace import (
    CASTS,
    Column,
    EngineRecord,
    ModelRecord,
    ParameterRecord,
    ProcessRecord,
    column_word,
    dtype_name,
    records,
)
from zerodrift.model import ModelSpec, OwningModule, ParameterSpec
from zerodrift.plan import Hidden, Plan, Row, Trace, TracedOperation, TracedTensor, build
from zerodrift.policy import SILENT, Columns, Master, mesh_for, need_of, remedy, resolve

COLUMNS = records.COLUMNS[:-1]  # the columns that a step shows; `export` is seen in files

Verdict = Literal["as declared", "not seen", "as autocast chose", "wider", "DIFFERENT"]

THE_MODELS: tuple[Column, ...] = ("compute", "grad")
"""Columns that a model's code may widen."""


def declared(columns: Columns) -> dict[Column, str]:
    """Return the cells of a row in the words of a record."""
    update = columns.update
    cells: dict[Column, str] = {"storage": column_word(columns.storage.dtype)}
    cells |= {"gather": column_word(columns.gather), "compute": column_word(columns.compute)}
    if update is not None:
        wire, total = column_word(update.reduce.wire), column_word(update.reduce.sum)
        cells |= {
            "grad": column_word(update.grad),
            "accumulate": column_word(update.accumulate.dtype),
            "reduce": wire if wire == total else f"{wire}>{total}",
            "master": "float32" if update.master is Master.FP32 else str(update.master),
            "state": column_word(update.state.dtype),
        }
    return cells


def verdict(plan: Plan, columns: Columns, column: Column, seen: frozenset[str]) -> Verdict:
    if not seen:
        return "not seen"
    said = declared(columns)[column]
    if seen == {said}:
        return "as declared"
    if column == "compute" and _autocast_chose(plan, columns, seen):
        return "as autocast chose"
    return "wider" if column in THE_MODELS and _hold(seen, said) else "DIFFERENT"


def _autocast_chose(plan: Plan, columns: Columns, seen: Iterable[str]) -> bool:
    mode = plan.policy.mode
    return mode.autocast and not columns.pinned and set(seen) <= {column_word(mode.dtype), "float32"}


def _hold(seen: Iterable[str], said: str) -> bool:
    """Return True if every seen dtype holds every value of the declared one."""
    least = from_torch(getattr(torch, said))
    dtypes = [from_torch(getattr(torch, part, torch.int8)) for word in seen for part in word.split(">")]
    return least is None or all(dtype is not None and dtype.holds(least) for dtype in dtypes)


def _judged(plan: Plan, observed: EngineRecord) -> Iterator[tuple[Row, Column, str, list[str], Verdict]]:
    """Yield every declared cell in plan order, with the seen dtypes and the verdict."""
    for row in plan.rows:
        for column, said in declared(row.columns).items():
            seen = observed.seen(row.name, column)
            yield row, column, said, sorted(seen), verdict(plan, row.columns, column, seen)


def findings(plan: Plan, observed: EngineRecord) -> list[Problem]:
    """Return every cell that was seen to be another dtype than declared, in plan order."""
    found = []
    for row, column, said, seen, judged in _judged(plan, observed):
        if judged == "DIFFERENT":
            must = f"`{column}` must be {said} ({row.columns.reasons().get(column, '')})"
            do = "The model's own code may round its inputs: change the code, or the plan."
            do = do if column in THE_MODELS else ""
            found.append(Problem(row.name, must, got=", ".join(seen), do=do))
    return found


def table(plan: Plan, observed: EngineRecord) -> list[tuple[Column, str, str, int, int, Verdict, str]]:
    """Return declared and seen dtypes by column, with counts of parameters and elements, and a name."""
    cells: dict[tuple[Column, str, str, Verdict], list[Row]] = {}
    for row, column, said, seen, judged in _judged(plan, observed):
        cells.setdefault((column, said, ", ".join(seen) or "not seen", judged), []).append(row)
    return [
        (column, said, seen, len(rows), sum(row.whole_numel for row in rows), judged, rows[0].name)
        for (column, said, seen, judged), rows in sorted(cells.items(), key=lambda c: COLUMNS.index(c[0][0]))
    ]


def line(plan: Plan, observed: EngineRecord) -> str:
    """Return the seen dtypes in one line, per column the dtype of the most elements first."""
    words = [f"backend={plan.policy.backend}"]
    for column in COLUMNS:
        weights: Counter[str] = Counter()
        for row in plan.rows:
            weights.update(dict.fromkeys(observed.seen(row.name, column), row.whole_numel))
        dtypes = sorted(weights, key=lambda dtype: (-weights[dtype], dtype))
        words.append(f"{column}={','.join(dtypes) or '-'}")
        if column == "compute":
            words.append(f"logits={','.join(sorted(observed.logits)) or '-'}")
    return "precision: " + " ".join(words)


def widened(plan: Plan, observed: EngineRecord) -> tuple[str, ...]:
    """Return a line for each column and dtype that the model's own code computed wider than planned."""
    lines = []
    for column, said, seen, count, _, judged, first in table(plan, observed):
        whose = first + (f" and {count - 1} more" if count > 1 else "")
        what = f"computes in {seen} with {whose}, for {said} in the plan; nothing is lost"
        if column == "grad":
            what = f"leaves gradients of {whose} in {seen}; they are rounded to {said}, as the plan says, "
            what += "where autograd adds them"
        if judged == "wider":
            lines.append(f"wider than planned: the model's own code {what}")
    return tuple(lines)


def require_declared(plan: Plan, observed: EngineRecord) -> None:
    """Raise one error for all cells that are neither as declared nor wider."""
    if wrong := findings(plan, observed):
        raise PrecisionError.of(wrong, "the run and its plan differ")


def unexpected(
    declaration: list[ProcessRecord] | Plan | Config, file: str, processes: Sequence[ProcessRecord]
) -> list[RunFinding]:
    """Return every cell that is not as a file says: a saved table, a plan, or a config in either dialect."""
    if isinstance(declaration, list):
        do = "If the change is intended, save the table again."
        return [
            RunFinding("not-as-expected", item.column, item.names, f"It was {item.a} and is {item.b}.", do)
            for item in tables.differences(declaration, processes)
        ]
    trained = [model for model in processes[0].models if model.trained]
    if len(trained) != 1:
        must = "must be a table that `check --save` wrote, where several models are trained"
        got = f"{len(trained)} models: {', '.join(model.name for model in trained)}"
        raise ConfigError(file, must, got=got)
    binds_all = isinstance(declaration, Plan)
    plan = _planned(declaration, trained[0], processes) if isinstance(declaration, Config) else declaration
    alike: dict[tuple[Kind, Column, str, str, str], list[str]] = {}
    for name, *cell in _differing(plan, trained[0], binds_all):
        alike.setdefault(tuple(cell), []).append(name)  # type: ignore[arg-type]
    do = "The library does not follow this key: check what it supports, or remove the key."
    found = []
    for (kind, column, said, why, seen), names in alike.items():
        what = f"{why}: {said} was declared, {seen} was seen."
        found.append(RunFinding(kind, column, tuple(names), what, do))
    return found


def _planned(config: Config, model: ModelRecord, processes: Sequence[ProcessRecord]) -> Plan:
    specs = []
    for seen in model.parameters:
        names = (seen.name, *seen.also)
        word = (seen.dtypes("storage") or ("float32",))[0]
        storage = from_torch(getattr(torch, word, torch.bfloat16))  # quantised weights decode to bf16
        owners = tuple(OwningModule(name.rpartition(".")[0], seen.kind) for name in names)
        specs.append(ParameterSpec(names, seen.shape, storage or DType.FP32, owners, seen.trained))
    config = without_torch_classes(config)
    mesh = mesh_for(config, processes[0].world)
    return build(resolve(config, mesh), ModelSpec(model.name, tuple(specs)), mesh)


def _differing(
    plan: Plan, model: ModelRecord, binds_all: bool
) -> Iterator[tuple[str, Kind, Column, str, str, str]]:
    """Yield name, kind, column, declared dtype, reason and seen dtypes of each cell that differs.

    A plan binds every column that other libraries have. A config binds those with a key, and `_BY_MODE`.
    """
    for row in plan.rows:
        parameter = model.parameter(row.name)
        if parameter is None:
            yield row.name, "not-as-expected", "storage", "a parameter", "in the plan", "none of that name"
            continue
        cells, why, asked = declared(row.columns), row.columns.reasons(), dict(row.columns.asked)
        for column in (column for column in cells if column not in _OWN):
            dtype = "float32" if cells[column] == "split" else cells[column].partition(">")[0]
            key = asked.get("reduce.wire" if column == "reduce" else column)
            is_bound = binds_all or key is not None or column in _BY_MODE
            if parameter.dtypes(column) and is_bound and not _holds(plan, row, column, dtype, parameter):
                kind: Kind = "not-as-expected" if key is None else "key-without-effect"
                reason = key if column == "reduce" and key is not None else why.get(column, "")
                if column == "master" and cells[column] == "split":
                    reason = f"mode {plan.policy.mode} updates an exact fp32 value"
                found = tables.cell(parameter, column)
                yield row.name, kind, column, tables.SHORT.get(dtype, dtype), reason, found


_BY_MODE: tuple[Column, ...] = ("storage", "compute", "master")
"""Columns that a mode decides; the others have defaults of zerodrift's own."""

_OWN: tuple[Column, ...] = ("gather", "grad")
"""Columns that other libraries do not have."""


def _holds(plan: Plan, row: Row, column: Column, said: str, parameter: ParameterRecord) -> bool:
    """Return True if a seen cell is as good as the declared one."""
    seen = parameter.dtypes(column)
    if column in ("master", "state"):
        in_storage = column == "master" and seen == ("same",) and parameter.dtypes("storage") == ("float32",)
        exact = {"float32", "split"} if column == "master" else {"float32"}
        return said != "float32" or set(seen) <= exact or in_storage
    if column == "compute" and plan.policy.mode.autocast and not row.columns.pinned:
        return _autocast_chose(plan, row.columns, seen)
    return _hold(seen, said)


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
    return bool(one and other and one.is_floating and other.is_floating and not other.holds(one))


def _read(operation: TracedOperation) -> tuple[TracedTensor, ...]:
    """Return the inputs of an operation, except the one that it overwrites."""
    return operation.inputs[1:] if operation.name == "copy_" else operation.inputs


def _pin_casts(plan: Plan, trace: Trace, forward: list[TracedOperation]) -> Iterator[Hidden]:
    """Find pinned parameters, and unrounded outputs of pinned modules, that are rounded before their use."""
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
            do = "The pin has no effect after this cast: fix the model's code."
            if operation.cast_by != "the model":
                do = "To keep it unrounded, also pin the module that uses it."
            yield Hidden("pin cast", name, what, operation.line, do)


def _promotions(forward: list[TracedOperation]) -> Iterator[Hidden]:
    """Find values that an operation widened because of its other operand, and that are rounded later."""
    origins: dict[int, TracedOperation] = {}
    """Memory of a widened tensor, or of one computed from it -> the operation that widened."""
    reported: set[int] = set()
    for operation in forward:
        inputs = [tensor for tensor in _read(operation) if _is_floating(tensor.dtype)]
        wide = next((tensor for tensor in inputs if tensor.memory in origins), None)
        origin = None if wide is None else origins[wide.memory]
        is_cast = bool(operation.cast_by) or operation.name in CASTS
        dtypes = {tensor.dtype for tensor in inputs}
        counted = {tensor.dtype for tensor in inputs if tensor.dims} or dtypes
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
            elif len(dtypes) > 1 and any(_loses(made.dtype, dtype) for dtype in counted):
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
    do = "In between it has the size of the wider dtype. Cast one of them, unless this is intended."
    if cast.cast_by == "autocast":
        do = "Autocast does this. Modes bf16 and fp16 widen nothing."
    return Hidden("promotion", origin.module, what, origin.line, do)


def _other_computes(plan: Plan, trace: Trace) -> Iterator[Hidden]:
    """Find parameters that enter operations in another dtype than planned, or no operation at all."""
    seen = computes(trace)
    for row in plan.rows:
        if not row.columns.compute.is_floating:
            continue
        used, planned = seen.get(row.name, {}), str(row.columns.compute)
        if not used and trace.refused is None and row.trained:
            do = "It gets no gradient. If this is intended, freeze it."
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
                do = "The model's own code rounds it: change the code, or the plan."
            yield Hidden("compute", row.name, what, operation.line, do)


def nondeterministic(plan: Plan, trace: Trace, device: str, digest_every: int = 0) -> Iterator[Hidden]:
    """Yield operations whose result on CUDA is not the same each time, each once per module.

    There are none unless the plan's order of sums or a run's digests require the same bits.

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
