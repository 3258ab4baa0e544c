"""A policy with other dtypes for some parameters: what a replay runs, and what a person pastes.

A parameter's forward is narrowed in two steps: what it is stored and gathered in rounds its values once, and
what it is computed in rounds every operation with it. Each is a cell that can be widened alone, but for one:
values that are not rounded are of use only where they are computed with as they are, so a wide `storage`
takes `compute` with it.

Invariant: pure, and a variant is a policy like any other: `build` judges it, and the engine runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zerodrift.dtypes import DType
from zerodrift.plan.table import Plan, Row
from zerodrift.policy.nouns import Batch, Columns, Mode, Output, Policy, ResolvedRule
from zerodrift.policy.rules import PIN

Cell = Literal["storage", "compute", "accumulate", "reduce", "master", "state", "export"]
"""A column, or several that are widened together: `storage` is `storage`, `gather` and `compute`."""

FORWARD: tuple[Cell, ...] = ("storage", "compute")
"""Cells that change what a forward computes."""

_WIDE = "fp32"


@dataclass(frozen=True, slots=True)
class Choice:
    """Cells of parameters that a name or a pattern stands for."""

    pattern: str
    """A name, or a glob for names that differ in numbers alone."""
    cell: Cell
    names: tuple[str, ...]
    """The first names of the parameters."""

    def __str__(self) -> str:
        return f"{self.pattern} {self.cell}"


def narrow_cells(columns: Columns) -> tuple[Cell, ...]:
    """What of a parameter is narrower than fp32, or is rounded on its way; in the order of COLUMNS."""
    found: list[Cell] = []
    if _narrow(columns.storage.dtype) or _narrow(columns.gather):
        found.append("storage")
    if _narrow(columns.compute):
        found.append("compute")
    update = columns.update
    if update is not None:
        if _narrow(update.accumulate.dtype):
            found.append("accumulate")
        if _narrow(update.reduce.wire) or _narrow(update.reduce.sum):
            found.append("reduce")
        if str(update.master) == "same" and _narrow(columns.storage.dtype):
            found.append("master")
        if str(update.state) != _WIDE:
            found.append("state")
    if _narrow(columns.export):
        found.append("export")
    return tuple(found)


def _narrow(dtype: DType) -> bool:
    return dtype.is_floating and not dtype.holds(DType.FP32)


def reference(policy: Policy) -> Policy:
    """The same run in fp32: nothing is rounded but by fp32 itself."""
    order = tuple(demand for demand in policy.demands if demand[0] in ("reduce.order", "reduce.when"))
    kept = ("placement", "optimizer", "reduce.when", "reduce.order")
    rules = (_only_columns(rule, kept) for rule in policy.rules)
    return replace(
        policy,
        mode=Mode.FP32,
        demands=order,
        rules=tuple(rule for rule in rules if rule.sets),
        safe=(),
        buffers=None,
        buffers_why="the reference keeps every buffer as the model has it",
        loss_scale=None,
    )


def _only_columns(rule: ResolvedRule, kept: Sequence[str]) -> ResolvedRule:
    return replace(rule, sets=tuple(pair for pair in rule.sets if pair[0] in kept), pin=False, output=None)


def for_micro_batches(policy: Policy, count: int, ranks: int) -> Policy:
    """The same, with one step over as many micro-batches on each rank."""
    return replace(policy, batch=Batch(policy.batch.micro, count, policy.batch.micro * count * ranks))


def without_update(policy: Policy) -> Policy:
    """The same for whoever looks at forwards alone: no optimizer takes memory."""
    return replace(policy, optimizer=None, schedule=None, statistics=False)


# --- wider ---------------------------------------------------------------------------------------------


def widened(plan: Plan, choices: Iterable[Choice], output: Output | None = None) -> Policy:
    """The policy of a plan, with these cells in fp32; `output` is what their modules return."""
    rules = []
    for choice in choices:
        sets = _sets_wide(choice.cell)
        beside = _beside(plan, choice) if "compute" in sets else []
        rules += [rule(name, sets, output=output) for name in choice.names]
        rules += [rule(name, {"compute": _WIDE}, output=output) for name in beside]
    return replace(plan.policy, rules=(*plan.policy.rules, *rules))


def _sets_wide(cell: Cell) -> dict[str, str]:
    if cell == "storage":
        return {"storage": _WIDE, "compute": _WIDE}
    if cell == "reduce":
        return {"reduce.wire": _WIDE, "reduce.sum": _WIDE}
    return {cell: _WIDE}


def _beside(plan: Plan, choice: Choice) -> list[str]:
    """Other parameters of the modules that own these: a module computes in one dtype."""
    modules = {
        name.rpartition(".")[0]
        for chosen in choice.names
        if (row := plan.row(chosen)) is not None
        for name in row.names
    }
    beside = (row for row in plan.rows if any(name.rpartition(".")[0] in modules for name in row.names))
    return [row.name for row in beside if row.name not in choice.names and row.columns.compute.is_floating]


def pinned(plan: Plan, outputs: Mapping[str, Output | None]) -> Policy:
    """The policy of a plan, with these parameters in fp32 everywhere; each with what its module returns."""
    rules = [rule(name, dict(PIN), pin=True, output=output) for name, output in outputs.items()]
    return replace(plan.policy, rules=(*plan.policy.rules, *rules))


# --- nothing but some cells narrow ---------------------------------------------------------------------


def only(plan: Plan, choices: Iterable[Choice], output: Output | None = None) -> Policy:
    """The reference, with these cells as narrow as in the plan; `output` is what their modules return."""
    rules = []
    for choice in choices:
        for name in choice.names:
            row = plan.row(name)
            if row is None:
                raise AssertionError(f"{name} is not in the plan")
            rules.append(rule(name, _sets_as(row, choice.cell), output=output))
        if choice.cell == "compute":
            narrow = next(iter(rules[-1].sets))[1]
            rules += [rule(name, {"compute": narrow}, output=output) for name in _beside(plan, choice)]
    wide = reference(plan.policy)
    return replace(wide, rules=(*wide.rules, *rules))


def _sets_as(row: Row, cell: Cell) -> dict[str, str]:
    columns, update = row.columns, row.columns.update
    if cell == "storage":
        # What storage rounds is seen where it is computed with in fp32.
        narrow = columns.storage.dtype if _narrow(columns.storage.dtype) else columns.gather
        return {"storage": str(narrow), "compute": _WIDE}
    if cell in ("compute", "export"):
        return {cell: str(getattr(columns, cell))}
    if update is None:
        return {}
    if cell == "reduce":
        return {"reduce.wire": str(update.reduce.wire), "reduce.sum": str(update.reduce.sum)}
    if cell == "accumulate":
        return {cell: str(update.accumulate.dtype)}
    return {cell: str(getattr(update, cell))}


def rule(
    name: str,
    sets: Mapping[str, str],
    *,
    pin: bool = False,
    output: Output | None = None,
    why: str = "the audit",
) -> ResolvedRule:
    """A rule for the parameter of this name alone."""
    return ResolvedRule("glob", literal(name), "", tuple(sets.items()), pin, output, why)


def literal(name: str) -> str:
    """A glob that matches this name alone."""
    return re.sub(r"([*?[])", r"[\1]", name)
