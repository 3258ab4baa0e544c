"""Variants of a policy with other dtypes for some parameters: what replays run, and what a person pastes.

Storage and gather round a parameter's values once. Compute rounds every operation with them. Each cell can be
widened alone, except `storage`, which has no effect without a wide `compute`.

Invariant: a variant is a policy like any other. `build` checks it, and the engine runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from zerodrift.dtypes import BLOCK, NARROW, DType
from zerodrift.plan import Plan, Row
from zerodrift.policy import PRODUCTS, SAFE_MODULES, Batch, Columns, Mode, Output, Policy, ResolvedRule

Cell = Literal["storage", "compute", "accumulate", "reduce"]
"""A column, or several that are widened together: `storage` stands for storage, gather and compute."""

_WIDE = "fp32"


@dataclass(frozen=True, slots=True)
class Choice:
    """A cell of some parameters."""

    pattern: str  # a name, or a glob
    cell: Cell
    names: tuple[str, ...]  # first names of the parameters


def narrow_cells(columns: Columns) -> tuple[Cell, ...]:
    """Return the cells of a parameter that are narrower than fp32, in the order of COLUMNS."""
    update = columns.update
    found: dict[Cell, bool] = {"storage": _is_narrow(columns.storage.dtype) or _is_narrow(columns.gather)}
    found["compute"] = _is_narrow(columns.compute) or columns.products is not None
    if update is not None:
        found["accumulate"] = _is_narrow(update.accumulate.dtype)
        found["reduce"] = _is_narrow(update.reduce.wire) or _is_narrow(update.reduce.sum)
    return tuple(cell for cell, narrow in found.items() if narrow)


def narrowest(*dtypes: DType) -> DType:
    return min(dtypes, key=lambda dtype: dtype.nbytes(BLOCK))


def _is_narrow(dtype: DType) -> bool:
    return dtype.is_floating and not dtype.holds(DType.FP32)


def reference_policy(policy: Policy) -> Policy:
    """Return the policy of the same run in fp32."""
    kept = ("placement", "optimizer", "reduce.when", "reduce.order")
    rules = []
    for each in policy.rules:
        sets = tuple(pair for pair in each.sets if pair[0] in kept)
        rules += [replace(each, sets=sets, pin=False, output=None)] if sets else []
    return replace(
        policy,
        mode=Mode.FP32,
        demands=tuple(demand for demand in policy.demands if demand[0] in ("reduce.order", "reduce.when")),
        rules=tuple(rules),
        safe=(),
        buffers=None,
        buffers_why="the reference keeps every buffer as the model has it",
        loss_scale=None,
    )


def for_micro_batches(policy: Policy, count: int, ranks: int) -> Policy:
    """Return a policy whose step has `count` micro-batches on each rank."""
    return replace(policy, batch=Batch(policy.batch.micro, count, policy.batch.micro * count * ranks))


def without_update(policy: Policy) -> Policy:
    """Return a policy without an optimizer, which saves the memory of its state."""
    return replace(policy, optimizer=None, schedule=None, statistics=False)


def autocast_policy(policy: Policy, mode: Mode) -> Policy:
    """Return a policy under autocast. Narrow formats stay."""
    forward, narrow = ("storage", "gather", "compute", "master"), tuple(map(str, NARROW))
    demands = tuple(each for each in policy.demands if each[0] not in forward or each[1] in narrow)
    return replace(policy, mode=mode, demands=demands, safe=SAFE_MODULES)


def with_rules(policy: Policy, rules: Iterable[ResolvedRule]) -> Policy:
    return replace(policy, rules=(*policy.rules, *rules))


_STORAGE, _REDUCE = ("storage", "gather", "compute"), ("reduce.wire", "reduce.sum")
_WIDENED: dict[Cell, tuple[str, ...]] = {"storage": _STORAGE, "reduce": _REDUCE}
"""Keys that are widened for a cell, unless the only key has the cell's name."""


def widened_policy(plan: Plan, choice: Choice, output: Output | None = None) -> Policy:
    """Return the policy of a plan with a cell in fp32. `output` is of the modules of its parameters."""
    sets = dict.fromkeys(_WIDENED.get(choice.cell, (choice.cell,)), _WIDE)
    beside = _siblings(plan, choice) if "compute" in sets else []
    rules = [make_rule(name, sets, output=output) for name in choice.names]
    rules += [make_rule(row.name, {"compute": _WIDE}, output=output) for row in beside]
    return with_rules(plan.policy, rules)


def isolated_policy(plan: Plan, choice: Choice, output: Output | None = None) -> Policy:
    """Return the policy of the fp32 reference with a cell of the forward as in the plan."""
    rows = [row for name in choice.names if (row := plan.row(name)) is not None]
    rules = [make_rule(row.name, _planned_cell(row, choice.cell), output=output) for row in rows]
    if choice.cell == "compute":
        beside = ((row.name, str(row.columns.compute)) for row in _siblings(plan, choice))
        rules += [make_rule(name, {"compute": planned}, output=output) for name, planned in beside]
    return with_rules(reference_policy(plan.policy), rules)


def _siblings(plan: Plan, choice: Choice) -> list[Row]:
    """Return the other parameters of the same modules, because a module computes in one dtype."""
    chosen = [row for name in choice.names if (row := plan.row(name)) is not None]
    modules = {name.rpartition(".")[0] for row in chosen for name in row.names}
    floating = [row for row in plan.rows if row.columns.compute.is_floating and row.name not in choice.names]
    return [row for row in floating if modules & {name.rpartition(".")[0] for name in row.names}]


def _planned_cell(row: Row, cell: Cell) -> dict[str, str]:
    columns = row.columns
    if cell == "storage":  # computing in fp32 shows the rounding of storage alone
        if columns.update is not None and columns.gather.format is not None:
            return {"storage": str(columns.storage.dtype), "gather": str(columns.gather), "compute": _WIDE}
        narrow = columns.storage.dtype if _is_narrow(columns.storage.dtype) else columns.gather
        return {"storage": str(narrow), "compute": _WIDE}
    cells = {"compute": str(columns.compute)}
    if (products := columns.products) is not None:
        cells |= {f"compute.{part}": str(getattr(products, part)) for part in PRODUCTS}
        cells["compute.pad"] = str(products.pad).lower()
    return cells


def make_rule(
    name: str,
    sets: Mapping[str, str],
    *,
    pin: bool = False,
    output: Output | None = None,
    why: str = "the audit",
) -> ResolvedRule:
    return ResolvedRule("glob", literal_glob(name), "", tuple(sets.items()), pin, output, why)


def literal_glob(name: str) -> str:
    """Return a glob that matches only this name."""
    return re.sub(r"([*?[])", r"[\1]", name)
