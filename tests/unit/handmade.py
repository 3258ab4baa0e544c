"""Plans, costs and columns made by hand, for tests of rooms that only read them.

Nothing here lays out as zerodrift does: parameters of one module path prefix are a unit, equal columns a
segment. A test that needs a true plan makes one with `zerodrift.api.make_plan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tests.unit import models
from zerodrift.api import make_plan
from zerodrift.config.loader import load
from zerodrift.dtypes import BLOCK, DType
from zerodrift.mesh import MeshShape
from zerodrift.model.spec import ModelSpec
from zerodrift.plan.bill import Cost, Peak, RestingBytes, Traffic
from zerodrift.plan.table import Boundary, BufferRow, Plan, Row, Segment, Unit
from zerodrift.policy.decisions import COLUMNS, Columns, Placed, Policy, Update
from zerodrift.policy.resolver import resolve


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


def policy(**changes: Any) -> Policy:
    """Return the policy of a usual config; `changes` are fields."""
    made = resolve(load(WRITTEN), MeshShape(shard=64))
    shown = tuple(each for each in made.decisions if each.key != "averaging")  # no page says the usual one
    return replace(made, **{"decisions": shown, **changes})


def plan(
    parameters: Sequence[PlannedParameter],
    mesh: MeshShape | None = None,
    buffers: Sequence[BufferRow] = (),
    notes: Sequence[str] = (),
    boundaries: Sequence[Boundary] = (),
    **changes: Any,
) -> Plan:
    """Return a plan of the given parameters; `changes` are fields of Policy or `source`."""
    mesh = mesh or MeshShape(shard=4)
    source = changes.pop("source", "handmade")
    rows: list[Row] = []
    units: list[Unit] = []
    segments: list[Segment] = []
    for name, members in _units(parameters).items():
        first_row, first_segment = len(rows), len(segments)
        by_layout: dict[Any, list[PlannedParameter]] = {}
        for parameter in members:
            by_layout.setdefault(parameter.columns.layout, []).append(parameter)
        for group in by_layout.values():
            _segment(group, len(units), mesh, rows, segments)
        spans = tuple(range(first_row, len(rows))), tuple(range(first_segment, len(segments)))
        units.append(Unit(name, *spans, stage=0))
    parts = map(tuple, (rows, buffers, units, segments, boundaries, notes))
    return Plan(source, policy(**changes), mesh, *parts)  # type: ignore[arg-type]


def _units(parameters: Sequence[PlannedParameter]) -> dict[str, list[PlannedParameter]]:
    """Group by the name up to its first number; the root takes the rest."""
    found: dict[str, list[PlannedParameter]] = {"": []}
    for parameter in parameters:
        parts = parameter.names[0].split(".")
        place = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        name = "" if place is None else ".".join(parts[: place + 1])
        found.setdefault(name, []).append(parameter)
    return found


def _segment(
    group: Sequence[PlannedParameter], unit: int, mesh: MeshShape, rows: list[Row], segments: list[Segment]
) -> None:
    offset = numel = 0
    start = len(rows)
    for names, shape, of in group:
        row = Row(names, shape, DType.BF16, "", of, unit, len(segments), offset)
        rows.append(row)
        numel += row.numel
        offset += -(-row.numel // BLOCK) * BLOCK
    step = BLOCK * mesh.shard
    padded = -(-offset // step) * step
    segments.append(Segment(unit, group[0].columns, tuple(range(start, len(rows))), numel, padded))


def cost(of: Plan, **changes: Any) -> Cost:
    """Return a bill with plausible figures."""
    total = sum(row.numel for row in of.rows)
    each = max(total // of.mesh.shard, 1)
    rest = RestingBytes(storage=2 * each, buffers=4096, accumulate=0, master=2 * each, state=8 * each)
    made = Cost(
        micro_batches=8,
        pipeline_stage=0,
        parameters=total,
        padding=sum(segment.padded - segment.numel for segment in of.segments),
        whole_padding=0,
        rest=rest,
        peak=Peak(rest.total, 12 * each, 4 * each, 2 * each, 3 * each),
        traffic=(
            Traffic("all_gather", "forward", "bf16", "shard", 264, 16 * total),
            Traffic("all_gather", "backward", "bf16", "shard", 256, 15 * total),
            Traffic("reduce_scatter", "reduce", "fp32", "shard", 264, 32 * total),
            Traffic("all_reduce", "norm", "fp64", "world", 1, 32),
        ),
    )
    return replace(made, **changes)


def moe(layers: int = 32, experts: int = 8) -> Plan:
    """Return a mixture of experts with pinned routers and tied embeddings."""
    low, high, norm = columns(), pinned(), pinned("precision.rules[1]: '*norm.weight'")
    found = [
        param("model.embed_tokens.weight", (32000, 4096), low, "lm_head.weight"),
        param("model.norm.weight", (4096,), norm),
    ]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        heads = (("q_proj", 4096), ("k_proj", 1024), ("v_proj", 1024), ("o_proj", 4096))
        found += [param(f"{at}.self_attn.{name}.weight", (size, 4096), low) for name, size in heads]
        found.append(param(f"{at}.block_sparse_moe.gate.weight", (experts, 4096), high))
        for expert, name in itertools.product(range(experts), ("w1", "w2", "w3")):
            shape = (4096, 14336) if name == "w2" else (14336, 4096)
            found.append(param(f"{at}.block_sparse_moe.experts.{expert}.{name}.weight", shape, low))
        for name in ("input_layernorm", "post_attention_layernorm"):
            found.append(param(f"{at}.{name}.weight", (4096,), norm))
    kept = "default: buffers are kept as the model made them"
    rotary = BufferRow("model.rotary_emb.inv_freq", (64,), DType.FP32, DType.FP32, kept)
    notes = ("gradients of 995 parameters are rounded once on the wire (fp32 -> bf16) and summed in fp32",)
    gates = [boundary(f"model.layers.{layer}.block_sparse_moe.gate") for layer in range(layers)]
    return plan(found, MeshShape(shard=64), [rotary], notes, gates, source="mixtral-8x7b")
