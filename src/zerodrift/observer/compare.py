"""Declared against observed: what a plan says of every parameter, what was seen of it, and where they differ.

A cell that was not seen is no difference: a rank that is alone sends nothing, an expert without tokens
computes nothing. What was seen must be what was declared, and nothing else beside it; only under autocast
does each operation decide what it computes in, out of two dtypes, unless a rule pins the parameter. A model's
own code may compute wider than declared, as many norms do: nothing is lost, so it is said and is no finding.

Invariant: pure. A finding names the parameter, the column, both dtypes, and the reason in the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from zerodrift.dtypes import DType, from_torch, lost
from zerodrift.errors import PrecisionError, Problem
from zerodrift.observer.observed import Column, Observed
from zerodrift.plan.table import Plan, Row
from zerodrift.policy.nouns import Columns, Master

COLUMNS: tuple[Column, ...] = (
    "storage",
    "gather",
    "compute",
    "grad",
    "accumulate",
    "reduce",
    "master",
    "state",
)
"""In the order of the plan."""

UNSEEN = "not seen"

Verdict = Literal["as declared", "not seen", "as autocast chose", "wider", "DIFFERENT"]

THE_MODELS: tuple[Column, ...] = ("compute", "grad")
"""What a model's own code may widen; the rest is the engine's doing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cell that is not what was declared."""

    name: str
    column: Column
    declared: str
    seen: tuple[str, ...]
    why: str
    """What set the cell, in the plan."""

    def __str__(self) -> str:
        return str(_problem(self))


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """One column over all parameters that agree in what is declared and what was seen."""

    column: str
    declared: str
    seen: str
    parameters: int
    numel: int
    example: str
    """The first of them."""
    verdict: Verdict


def declared(columns: Columns) -> dict[Column, str]:
    """The cells of a row in the words of an observation."""
    update = columns.update
    cells: dict[Column, str] = {
        "storage": _name(columns.storage.dtype),
        "gather": _name(columns.gather),
        "compute": _name(columns.compute),
    }
    if update is not None:
        wire, total = _name(update.reduce.wire), _name(update.reduce.sum)
        cells |= {
            "grad": _name(update.grad),
            "accumulate": _name(update.accumulate.dtype),
            "reduce": wire if wire == total else f"{wire}>{total}",
            "master": _name(DType.FP32) if update.master is Master.FP32 else str(update.master),
            "state": _name(update.state.dtype),
        }
    return cells


def verdict(plan: Plan, columns: Columns, column: Column, seen: frozenset[str]) -> Verdict:
    """What is to be said of one cell of one parameter."""
    if not seen:
        return "not seen"
    if seen == {declared(columns)[column]}:
        return "as declared"
    mode = plan.policy.mode
    chosen = mode.autocast and column == "compute" and not columns.pinned
    fine = chosen and seen <= {_name(mode.dtype), _name(DType.FP32)}
    if fine:
        return "as autocast chose"
    return "wider" if column in THE_MODELS and _wider(declared(columns)[column], seen) else "DIFFERENT"


def _wider(said: str, seen: Iterable[str]) -> bool:
    """Whether everything that was seen holds every value of what was declared."""
    at_least = from_torch(getattr(torch, said))
    dtypes = [from_torch(getattr(torch, what)) for what in seen]
    return at_least is not None and all(dtype is not None and not lost(at_least, dtype) for dtype in dtypes)


def findings(plan: Plan, observed: Observed) -> list[Finding]:
    """Every cell that was seen to be something else, in plan order."""
    findings = []
    for row in plan.rows:
        why = row.columns.reasons()
        for column, said in declared(row.columns).items():
            seen = observed.seen(row.name, column)
            if verdict(plan, row.columns, column, seen) == "DIFFERENT":
                findings.append(Finding(row.name, column, said, tuple(sorted(seen)), why.get(column, "")))
    return findings


def table(plan: Plan, observed: Observed) -> list[ComparedCell]:
    """Column by column: what is declared, what was seen, for how many."""
    cells: dict[tuple[str, str, str, Verdict], list[Row]] = {}
    for column in COLUMNS:
        for row in plan.rows:
            said = declared(row.columns).get(column)
            if said is None:
                continue
            dtypes = observed.seen(row.name, column)
            judged = verdict(plan, row.columns, column, dtypes)
            key = (column, said, ", ".join(sorted(dtypes)) or UNSEEN, judged)
            cells.setdefault(key, []).append(row)
    return [
        ComparedCell(
            column=column,
            declared=said,
            seen=seen,
            parameters=len(rows),
            numel=sum(row.whole_numel for row in rows),
            example=rows[0].name,
            verdict=judged,
        )
        for (column, said, seen, judged), rows in cells.items()
    ]


def line(plan: Plan, observed: Observed) -> str:
    """What was seen, in one line: per column the dtypes, that of the most elements first."""
    words = [f"backend={plan.policy.backend}"]
    for column in COLUMNS:
        words.append(f"{column}={_most_first(plan, observed, column)}")
        if column == "compute":
            words.append(f"logits={','.join(sorted(observed.logits)) or '-'}")
    return "precision: " + " ".join(words)


def widened(plan: Plan, observed: Observed) -> tuple[str, ...]:
    """What the model's own code computed wider than planned, a line each; none where it did not."""
    return tuple(
        _WIDENED[cell.column].format(
            seen=cell.seen,
            whose=cell.example + (f" and {cell.parameters - 1} more" if cell.parameters > 1 else ""),
            declared=cell.declared,
        )
        for cell in table(plan, observed)
        if cell.verdict == "wider"
    )


_WIDENED = {
    "compute": (
        "wider than planned: the model's own code computes in {seen} with {whose}, for {declared} in the "
        "plan; nothing is lost"
    ),
    "grad": (
        "wider than planned: the model's own code leaves gradients of {whose} in {seen}; they are rounded "
        "to {declared}, as the plan says, where autograd adds them"
    ),
}
"""By column, of those in `THE_MODELS`."""


def require_declared(plan: Plan, observed: Observed) -> None:
    """Raise where anything was seen that is not declared, and not wider."""
    wrong = findings(plan, observed)
    if wrong:
        raise PrecisionError.of(map(_problem, wrong), "the run and its plan differ")


def _problem(finding: Finding) -> Problem:
    return Problem(
        finding.name,
        f"`{finding.column}` must be {finding.declared} ({finding.why})",
        got=", ".join(finding.seen),
        do=_OWN_CODE if finding.column in THE_MODELS else "",
    )


_OWN_CODE = "The model's own code may round what it is given: change that, or what the plan says."


def _most_first(plan: Plan, observed: Observed, column: Column) -> str:
    weights: dict[str, int] = {}
    for row in plan.rows:
        for what in _sorted(observed.seen(row.name, column)):
            weights[what] = weights.get(what, 0) + row.whole_numel
    return ",".join(sorted(weights, key=lambda what: (-weights[what], what))) or "-"


def _sorted(words: Iterable[str]) -> list[str]:
    return sorted(words)


def _name(dtype: DType) -> str:
    return str(dtype.torch).removeprefix("torch.")
