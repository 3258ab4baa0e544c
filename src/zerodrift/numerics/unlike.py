"""In what two sides differ: the cells that a replay can take from either side.

A cell is some tensors whose values are others, some parameters that are computed in another dtype, or one
thing of a forward that is done in another dtype. A tensor that is not what was trained is a cell of its own;
those that are only rounded are taken together by role.

Invariant: pure. What is the same on both sides once the trainer has rounded it is no cell of its own: one
that was sent in bf16 and is multiplied in fp32 is another dtype to a trainer in bf16, and no other value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, Problems, UnsupportedError, did_you_mean
from zerodrift.numerics.roles import Role
from zerodrift.numerics.sampler import SamplerDtypes
from zerodrift.numerics.sent import SentTensor
from zerodrift.numerics.tensors import TensorVerdict
from zerodrift.plan.table import Plan, Row
from zerodrift.policy.nouns import Mode
from zerodrift.policy.rules import glob

Of = Literal["tensor", "weights", "dtype", "compute", "buffers", "activation"]


@dataclass(frozen=True, slots=True)
class UnlikeCell:
    """One thing in which the other side differs."""

    of: Of
    """`tensor`: not what was trained; `weights`: rounded; `dtype`: computed in another; `compute`: the same,
    of all that have no key of their own."""
    key: str
    """The tensor's name, or the key of the sampler's table."""
    told: str
    """In words: `rounded to bf16`, `bf16, here fp32`."""
    names: tuple[str, ...] = ()
    """Of the tensors."""

    def __str__(self) -> str:
        return f"{self.key}: {self.told}"


# --- values -------------------------------------------------------------------------------------------


def unlike_values(
    plan: Plan,
    trained: Mapping[str, Tensor],
    sent: Mapping[str, SentTensor],
    verdicts: Mapping[str, TensorVerdict],
    roles: Mapping[str, Role],
) -> list[UnlikeCell]:
    """Tensors with which the trainer would compute something else."""
    cells: list[UnlikeCell] = []
    groups: dict[tuple[str, str], list[str]] = {}
    for name, verdict in verdicts.items():
        if verdict.kind == "missing":
            continue
        if not verdict.is_precision:
            cells.append(UnlikeCell("tensor", name, f"{verdict.kind}, {verdict.told}", (name,)))
            continue
        row = plan.row(name)
        seen_in = row.columns.storage.dtype if row is not None else DType.FP32
        if not _equal(trained[name], sent[name].values, seen_in):
            role = roles[row.name] if row is not None else "buffers"
            groups.setdefault((role, _precision(sent[name], verdict)), []).append(name)
    cells += [
        UnlikeCell("weights", f"{role} weights", told, tuple(names)) for (role, told), names in groups.items()
    ]
    return cells


def _precision(tensor: SentTensor, verdict: TensorVerdict) -> str:
    return tensor.dtype if verdict.kind == "quantised" else verdict.told


def _equal(trained: Tensor, other: Tensor, seen_in: DType) -> bool:
    if not trained.is_floating_point():
        return bool((trained == other).all())
    return bool((trained.to(seen_in.torch) == other.to(seen_in.torch)).all())


# --- dtypes -------------------------------------------------------------------------------------------


def mode_of(table: SamplerDtypes, plan: Plan) -> Mode:
    """The recipe of the other side."""
    return plan.policy.mode if table.compute is None else Mode(str(table.compute))


def sampler_dtypes(table: SamplerDtypes, plan: Plan, roles: Mapping[str, Role]) -> dict[str, DType]:
    """First name -> what the other side computes a floating parameter in, where its table says it."""
    _require_matches(table, plan, roles)
    by_role = dict(table.roles)
    found: dict[str, DType] = {}
    for row in plan.rows:
        if not row.columns.compute.is_floating:
            continue
        globs = (dtype for pattern, dtype in reversed(table.tensors) if any(map(glob(pattern), row.names)))
        dtype = next(globs, by_role.get(roles[row.name], table.compute))
        if dtype is not None:
            found[row.name] = dtype
    return found


def _require_matches(table: SamplerDtypes, plan: Plan, roles: Mapping[str, Role]) -> None:
    problems = Problems()
    has = set(roles.values())
    for role, _ in table.roles:
        if role not in has:
            do = f"The model has {', '.join(sorted(has))}."
            if role == "embedding" and any(len(row.names) > 1 for row in plan.rows):
                do += " Its table of embeddings is tied: it is the `head`."
            problems.add(role, "must be of a parameter of the model", got="none of that role", do=do)
    names = [name for row in plan.rows for name in row.names]
    for pattern, _ in table.tensors:
        if not any(map(glob(pattern), names)):
            hint = did_you_mean(pattern, names)
            problems.add(f"tensors.{pattern}", "must match a parameter", got="no match", do=hint)
    problems.raise_as(ConfigError, "sampler")


def unlike_dtypes(
    table: SamplerDtypes, plan: Plan, roles: Mapping[str, Role], dtypes: Mapping[str, DType]
) -> list[UnlikeCell]:
    """Parameters that are computed in other dtypes, by the key that says it."""
    before, after = plan.policy.mode, mode_of(table, plan)
    _require_possible(plan, roles, dtypes, after)
    changed: list[str] = []
    groups: dict[tuple[str, str], list[str]] = {}
    for row in plan.rows:
        dtype = dtypes.get(row.name)
        if dtype is None:
            continue
        if before is not after and not row.columns.pinned and _is_usual(row, before) and dtype is after.dtype:
            changed.append(row.name)
        elif dtype is not row.columns.compute or (before.autocast and not row.columns.pinned):
            words = f"{row.columns.compute}, there {dtype}"
            groups.setdefault((roles[row.name], words), []).append(row.name)
    cells = [UnlikeCell("dtype", key, told, tuple(names)) for (key, told), names in groups.items()]
    if before is not after:
        cells.insert(0, UnlikeCell("compute", "compute", f"{before}, there {after}", tuple(changed)))
    return cells


def _require_possible(
    plan: Plan, roles: Mapping[str, Role], dtypes: Mapping[str, DType], after: Mode
) -> None:
    """Under autocast each operation has its dtype, and only fp32 can be asked of one parameter."""
    if not plan.policy.mode.autocast:
        return
    usual = DType.FP32 if after.autocast else after.dtype
    wrong = {roles[name]: dtype for name, dtype in dtypes.items() if dtype not in (DType.FP32, usual)}
    for role, dtype in wrong.items():
        raise UnsupportedError(
            f"sampler.{role}",
            "must be fp32, or what `compute` says, beside a trainer under autocast",
            got=dtype,
            do="Say with `compute` what the sampler computes in: it has no autocast.",
        )


def _is_usual(row: Row, mode: Mode) -> bool:
    return mode.autocast or row.columns.compute is mode.dtype
