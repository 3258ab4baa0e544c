"""Plans of parameters with columns of any kind, for tests of rooms that only read them.

The layout, the policy and the cost are those of a true plan; only the columns of its rows are made by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tests.unit import models
from zerodrift.api import make_plan
from zerodrift.dtypes import DType
from zerodrift.mesh import MeshShape
from zerodrift.model.spec import BufferSpec, ModelSpec
from zerodrift.plan.table import Boundary, BufferRow, Plan
from zerodrift.policy.decisions import COLUMNS, Columns, Placed, Update


def columns(dtype: DType = DType.BF16, why: str = "", **changes: Any) -> Columns:
    """Return the columns of a trained parameter at stage 3; `changes` are fields of Columns or Update."""
    one = ModelSpec("m", (models.parameter("a.w", (8, 8)),))
    made = make_plan(models.at(3, "fp32" if dtype is DType.FP32 else "bf16"), one, 2).rows[0].columns
    assert made.update is not None
    mine = {key: changes.pop(key) for key in list(changes) if key in Update.__dataclass_fields__}
    dtypes = {"storage": Placed(dtype, "shard"), **dict.fromkeys(("gather", "compute", "export"), dtype)}
    kept = ("accumulate", "reduce", "state", "export")  # said of all, whatever a rule says of the rest
    reasons = tuple((column, reason if column in kept else why or reason) for column, reason in made.why)
    update = replace(made.update, **{"grad": dtype, **mine})
    return replace(made, **{**dtypes, "output": "keep", "update": update, "why": reasons, **changes})


def pinned(why: str = "precision.rules[0]: '*.gate.weight'") -> Columns:
    """Return columns that are fp32 everywhere."""
    made = columns(DType.FP32)
    return replace(made, pinned=True, why=tuple((column, why) for column in COLUMNS))


def boundary(path: str, why: str = "precision.rules[0]: '*.gate.weight'") -> Boundary:
    """Return the boundary of a pinned router."""
    reasons = (("dtype", why), ("output", "one matrix, as a router or a head"))
    return Boundary(path, DType.FP32, "keep", DType.BF16, reasons)


def frozen(dtype: DType = DType.BF16) -> Columns:
    """Return the columns of a parameter that is not trained."""
    why = dict.fromkeys(("storage", "gather", "compute", "export"), f"frozen: {dtype} as it came")
    return replace(columns(dtype), update=None, why=tuple(why.items()))


class PlannedParameter(NamedTuple):
    """One parameter of a handmade plan."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    columns: Columns


def param(name: str, shape: tuple[int, ...], of: Columns, *also: str) -> PlannedParameter:
    return PlannedParameter((name, *also), shape, of)


WRITTEN = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_max_live_parameters": 10**9},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "sharding": {"keep_gathered": "never"},
    "train_batch_size": 2048,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
}


def plan(
    parameters: Sequence[PlannedParameter],
    mesh: MeshShape | None = None,
    buffers: Sequence[BufferRow] = (),
    notes: Sequence[str] = (),
    boundaries: Sequence[Boundary] = (),
    **changes: Any,
) -> Plan:
    """Return a plan of the given parameters; `changes` are fields of Policy."""
    found = tuple(models.tied(each.names, each.shape, ("",) * len(each.names)) for each in parameters)
    made = make_plan(WRITTEN, ModelSpec("handmade", found), (mesh or MeshShape(shard=4)).shard)
    by_name = {each.names[0]: each.columns for each in parameters}
    rows = tuple(replace(row, columns=by_name[row.name]) for row in made.rows)
    parts = {"buffers": tuple(buffers), "notes": tuple(notes), "boundaries": tuple(boundaries)}
    return replace(made, rows=rows, policy=replace(made.policy, **changes), **parts)


def moe(layers: int = 32, experts: int = 8) -> Plan:
    """Return the plan of a mixture of experts with pinned routers and norms, and tied embeddings."""
    tie = ("model.embed_tokens.weight", "lm_head.weight")
    found = [models.tied(tie, (32000, 4096), (models.EMBEDDING, models.LINEAR))]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        heads = (("q_proj", 4096), ("k_proj", 1024), ("v_proj", 1024), ("o_proj", 4096))
        shapes = {f"{at}.self_attn.{name}.weight": (size, 4096) for name, size in heads}
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (experts, 4096)
        for expert, name in itertools.product(range(experts), ("w1", "w2", "w3")):
            shape = (4096, 14336) if name == "w2" else (14336, 4096)
            shapes[f"{at}.block_sparse_moe.experts.{expert}.{name}.weight"] = shape
        found += [models.parameter(name, shape) for name, shape in shapes.items()]
        for name in ("input_layernorm", "post_attention_layernorm"):
            found.append(models.parameter(f"{at}.{name}.weight", (4096,), models.NORM))
    found.append(models.parameter("model.norm.weight", (4096,), models.NORM))
    rotary = (BufferSpec("model.rotary_emb.inv_freq", (64,), DType.FP32),)
    rules = [{"match": match, "pin": "fp32"} for match in ("*.gate.weight", "*norm.weight")]
    precision = {"mode": "bf16", "reduce": {"wire": "bf16"}, "rules": rules}
    written = {**WRITTEN, "precision": precision}
    return make_plan(written, ModelSpec("mixtral-8x7b", tuple(found), rotary), 64)
