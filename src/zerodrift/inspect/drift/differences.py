"""List the cells in which a sampler differs from a trainer: what a replay can take from either side.

A cell is tensors with other values, parameters that compute in another dtype, or an activation in another
dtype. A tensor that is not what was trained is a cell of its own; tensors that are only rounded are taken
together by role.

Invariant: pure. What is equal on both sides once the trainer has rounded it is no cell: a tensor that was
sent in bf16 and is multiplied in fp32 is another dtype to a trainer in bf16, and no other value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, Problems, UnsupportedError, did_you_mean
from zerodrift.inspect.drift.sampler_dtypes import Role, SamplerDtypes
from zerodrift.inspect.drift.sampler_weights import SamplerTensor
from zerodrift.inspect.drift.tensor_status import TensorVerdict
from zerodrift.inspect.drift.trainer import TrainerSide
from zerodrift.plan import Plan
from zerodrift.policy import Mode, glob


@dataclass(frozen=True, slots=True)
class DifferentCell:
    """One thing in which the sampler differs."""

    kind: Literal["tensor", "weights", "dtype", "compute", "buffers", "activation"]
    """`tensor`: not what was trained; `weights`: rounded; `dtype`: parameters in another compute dtype;
    `compute`: the same for all parameters without a key of their own."""
    key: str  # a tensor's name, or a key of the sampler's table
    told: str  # the difference in words: `rounded to bf16`, `bf16, here fp32`
    names: tuple[str, ...] = ()  # names of the tensors


def different_values(
    trainer: TrainerSide,
    trained: Mapping[str, Tensor],
    held: Mapping[str, SamplerTensor],
    verdicts: Mapping[str, TensorVerdict],
) -> list[DifferentCell]:
    """Cells of tensors with which the trainer would compute something else."""
    cells: list[DifferentCell] = []
    rounded: dict[tuple[str, str], list[str]] = {}
    for name, verdict in verdicts.items():
        if verdict.kind == "missing":
            continue
        if not verdict.is_as_trained:
            cells.append(DifferentCell("tensor", name, f"{verdict.kind}, {verdict.told}", (name,)))
            continue
        row, mine, theirs = trainer.plan.row(name), trained[name], held[name].values
        if mine.is_floating_point():
            storage = (row.columns.storage.dtype if row is not None else DType.FP32).torch
            mine, theirs = mine.to(storage), theirs.to(storage)
        if not bool((mine == theirs).all()):
            role = str(trainer.roles[row.name]) if row is not None else "buffers"
            told = held[name].dtype if verdict.kind == "quantised" else verdict.told
            rounded.setdefault((role, told), []).append(name)
    for (role, told), names in rounded.items():
        cells.append(DifferentCell("weights", f"{role} weights", told, tuple(names)))
    return cells


def sampler_mode(table: SamplerDtypes, plan: Plan) -> Mode:
    return plan.policy.mode if table.compute is None else Mode(str(table.compute))


def sampler_compute(table: SamplerDtypes, plan: Plan, roles: Mapping[str, Role]) -> dict[str, DType]:
    """First name -> the sampler's compute dtype of a floating parameter, where its table says it."""
    problems, has = Problems(), set(roles.values())
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
    by_role, found = dict(table.roles), {}
    for row in plan.rows:
        if row.columns.compute.is_floating:
            globs = (d for pattern, d in reversed(table.tensors) if any(map(glob(pattern), row.names)))
            dtype = next(globs, by_role.get(roles[row.name], table.compute))
            if dtype is not None:
                found[row.name] = dtype
    return found


def different_dtypes(
    table: SamplerDtypes, plan: Plan, roles: Mapping[str, Role], compute: Mapping[str, DType]
) -> list[DifferentCell]:
    """Cells of parameters that compute in another dtype. Under autocast each operation has its dtype, so only
    fp32 can be asked of one parameter."""
    before, after = plan.policy.mode, sampler_mode(table, plan)
    if before.autocast:
        usual = DType.FP32 if after.autocast else after.dtype
        for name, dtype in compute.items():
            if dtype not in (DType.FP32, usual):
                must = "must be fp32, or what `compute` says, beside a trainer under autocast"
                do = "Say with `compute` what the sampler computes in: it has no autocast."
                raise UnsupportedError(f"sampler.{roles[name]}", must, got=dtype, do=do)
    changed: list[str] = []
    groups: dict[tuple[str, str], list[str]] = {}
    for row in plan.rows:
        if row.name not in compute:
            continue
        dtype, mine, is_free = compute[row.name], row.columns.compute, not row.columns.pinned
        follows_mode = is_free and (before.autocast or mine is before.dtype)
        if before is not after and follows_mode and dtype is after.dtype:
            changed.append(row.name)
        elif dtype is not mine or (before.autocast and is_free):
            groups.setdefault((roles[row.name], f"{mine}, there {dtype}"), []).append(row.name)
    cells = [DifferentCell("dtype", key, told, tuple(names)) for (key, told), names in groups.items()]
    if before is not after:
        cells.insert(0, DifferentCell("compute", "compute", f"{before}, there {after}", tuple(changed)))
    return cells
