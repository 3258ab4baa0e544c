"""Compare a declaration with a run: our engine with its plan, or anybody's run with a file (`--expect`).

A cell that was not seen is no difference. A cell that was seen must be as declared, with three exceptions.
Under autocast an operation computes in one of two dtypes, unless a rule pins the parameter. A model's own
code may compute wider than declared, as many norms do: nothing is lost. Another library may keep its own
defaults: a config binds it only in columns that a key decides.

Invariant: pure. A finding names the parameter, the column, both dtypes, and the reason in the plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from zerodrift.config import load
from zerodrift.dtypes import DType, from_torch, lost
from zerodrift.errors import ConfigError, PrecisionError, Problem
from zerodrift.inspect.check import table as tables
from zerodrift.inspect.check.run_finding import Kind, RunFinding
from zerodrift.inspect.trace import (
    Column,
    EngineRecord,
    ModelRecord,
    ParameterRecord,
    ProcessRecord,
    column_word,
    records,
)
from zerodrift.model import ModelSpec, OwningModule, ParameterSpec
from zerodrift.plan import Plan, Row, build
from zerodrift.policy import Columns, Master, State, mesh_for, resolve

COLUMNS = records.COLUMNS[:-1]  # the columns that a step shows; `export` is seen in files

UNSEEN = "not seen"

Verdict = Literal["as declared", "not seen", "as autocast chose", "wider", "DIFFERENT"]

THE_MODELS: tuple[Column, ...] = ("compute", "grad")
"""Columns that a model's own code may widen; the engine decides the others."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cell that is not as declared."""

    name: str
    column: Column
    declared: str
    seen: tuple[str, ...]
    why: str  # the reason of the cell in the plan

    @property
    def problem(self) -> Problem:
        must = f"`{self.column}` must be {self.declared} ({self.why})"
        do = "The model's own code may round what it is given: change that, or what the plan says."
        got, do = ", ".join(self.seen), do if self.column in THE_MODELS else ""
        return Problem(self.name, must, got=got, do=do)

    def __str__(self) -> str:
        return str(self.problem)


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """One column of all parameters that agree in the declared and the seen dtypes."""

    column: Column
    declared: str
    seen: str
    parameters: int
    numel: int
    example: str
    verdict: Verdict


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
    return least is None or all(dtype is not None and not lost(least, dtype) for dtype in dtypes)


def _judged(plan: Plan, observed: EngineRecord) -> Iterator[tuple[Row, Column, str, list[str], Verdict]]:
    """Yield every declared cell in plan order, with what was seen of it."""
    for row in plan.rows:
        for column, said in declared(row.columns).items():
            seen = observed.seen(row.name, column)
            yield row, column, said, sorted(seen), verdict(plan, row.columns, column, seen)


def findings(plan: Plan, observed: EngineRecord) -> list[Finding]:
    """Return every cell that was seen to be another dtype than declared, in plan order."""
    return [
        Finding(row.name, column, said, tuple(seen), row.columns.reasons().get(column, ""))
        for row, column, said, seen, judged in _judged(plan, observed)
        if judged == "DIFFERENT"
    ]


def table(plan: Plan, observed: EngineRecord) -> list[ComparedCell]:
    """Return declared and seen dtypes column by column, with the number of parameters."""
    cells: dict[tuple[Column, str, str, Verdict], list[Row]] = {}
    for row, column, said, seen, judged in _judged(plan, observed):
        cells.setdefault((column, said, ", ".join(seen) or UNSEEN, judged), []).append(row)
    return [
        ComparedCell(column, said, seen, len(rows), sum(r.whole_numel for r in rows), rows[0].name, judged)
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
    """Return a line for each cell that the model's own code computed wider than planned."""
    lines = []
    for cell in table(plan, observed):
        whose = cell.example + (f" and {cell.parameters - 1} more" if cell.parameters > 1 else "")
        what = f"computes in {cell.seen} with {whose}, for {cell.declared} in the plan; nothing is lost"
        if cell.column == "grad":
            what = f"leaves gradients of {whose} in {cell.seen}; they are rounded to {cell.declared}, as the "
            what += "plan says, where autograd adds them"
        if cell.verdict == "wider":
            lines.append(f"wider than planned: the model's own code {what}")
    return tuple(lines)


def require_declared(plan: Plan, observed: EngineRecord) -> None:
    """Raise one error for all cells that are neither as declared nor wider."""
    if wrong := findings(plan, observed):
        raise PrecisionError.of([finding.problem for finding in wrong], "the run and its plan differ")


def unexpected(path: Path, processes: Sequence[ProcessRecord]) -> list[RunFinding]:
    """Return every cell that is not as a file says: a saved table, a plan, or a config in either dialect."""
    declaration = tables.read_declaration(path)
    if isinstance(declaration, list):
        do = "If the change is meant, save the table anew."
        return [
            RunFinding("not-as-expected", item.column, item.names, f"It was {item.a} and is {item.b}.", do)
            for item in tables.differences(declaration, processes)
        ]
    trained = [model for model in processes[0].models if model.trained]
    if len(trained) != 1:
        must = "must be a table that `check --save` wrote, where several models are trained"
        got = f"{len(trained)} models: {', '.join(model.name for model in trained)}"
        raise ConfigError(path.name, must, got=got)
    binds_all = declaration is not None
    plan = declaration or _planned(path, trained[0], processes[0].world)
    alike: dict[tuple[Column, str, str, str], list[str]] = {}
    for name, *cell in _differing(plan, trained[0], processes[0].micro_batches, binds_all):
        alike.setdefault(tuple(cell), []).append(name)  # type: ignore[arg-type]
    do = "The library that runs does not do what the key says: see what it supports, or leave the key out."
    found = []
    for (column, said, why, seen), names in alike.items():
        what = f"{why}: {said} was declared, {seen} was seen."
        kind: Kind = "key-without-effect" if _KEY.search(why) else "not-as-expected"
        found.append(RunFinding(kind, column, tuple(names), what, do))
    return found


_KEY = re.compile(r"[a-z_]+\.[a-z_]+|communication_data_type|[a-z]+_dtype")
"""Matches a key in the reason of a cell."""


def _planned(path: Path, model: ModelRecord, world: int) -> Plan:
    specs = []
    for seen in model.parameters:
        names = (seen.name, *seen.also)
        word = (seen.dtypes("storage") or ("float32",))[0]
        storage = from_torch(getattr(torch, word, torch.bfloat16))  # a library's narrow weights decode to it
        owners = tuple(OwningModule(name.rpartition(".")[0], seen.kind) for name in names)
        specs.append(ParameterSpec(names, seen.shape, storage or DType.FP32, owners, seen.trained))
    config = load(path)
    mesh = mesh_for(config, world)
    return build(resolve(config, mesh), ModelSpec(model.name, tuple(specs)), mesh)


def _differing(
    plan: Plan, model: ModelRecord, micro_batches: int, binds_all: bool
) -> Iterator[tuple[str, Column, str, str, str]]:
    """Yield name, column, declared dtype, reason and seen dtypes of each cell that differs.

    A plan binds every column that other libraries have, a config only those that it decides by no default.
    """
    for row in plan.rows:
        parameter = model.parameter(row.name)
        if parameter is None:
            yield row.name, "storage", "a parameter", "in the plan", "none of that name"
            continue
        cells, update, why = declared(row.columns), row.columns.update, row.columns.reasons()
        said: dict[Column, str] = {"storage": cells["storage"], "compute": cells["compute"]}
        if update is not None:
            state = "float32" if update.state is State.FP32 else str(update.state.value)
            master = "same" if update.master is Master.SAME else "float32"
            said |= {"accumulate": cells["accumulate"], "reduce": column_word(update.reduce.wire)}
            said |= {"master": master, "state": state}
        for column, dtype in said.items():
            reason = why.get(column, "")
            if column == "reduce":
                reason = re.split("; (?:sum|when) ", reason)[0]  # that of the wire
            once = column == "reduce" or (column == "accumulate" and micro_batches == 1)
            is_decided = "default" not in reason and (bool(_KEY.search(reason)) or not once)
            if not parameter.dtypes(column) or not (binds_all or is_decided):
                continue
            if not _holds(plan, row, column, dtype, parameter):
                yield row.name, column, tables.SHORT.get(dtype, dtype), reason, tables.cell(parameter, column)


def _holds(plan: Plan, row: Row, column: Column, said: str, parameter: ParameterRecord) -> bool:
    """Return True if a seen cell is as good as the declared one."""
    seen = parameter.dtypes(column)
    if column in ("master", "state"):
        in_storage = column == "master" and seen == ("same",) and parameter.dtypes("storage") == ("float32",)
        return said != "float32" or set(seen) <= {"float32"} or in_storage
    if column == "compute" and plan.policy.mode.autocast and not row.columns.pinned:
        return _autocast_chose(plan, row.columns, seen)
    return _hold(seen, said)
