"""Experts in a plan: their rows, a rank's share of them, refusals, and unchanged other rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.models import at, moe, parameter
from tests.unit.refusals import error_of
from zerodrift import ConfigError, MeshError, ModelSpec, Plan, cost, make_plan
from zerodrift.dtypes import BLOCK
from zerodrift.experts.dispatch import TokenRouting
from zerodrift.mesh import MeshShape
from zerodrift.model.spec import ParameterSpec
from zerodrift.optim import keys_of_blocks
from zerodrift.plan.schedule import collectives
from zerodrift.record import decode, encode

COUNT = 6


def stacked(layers: int = 2, *more: ParameterSpec) -> ModelSpec:
    """Return a model with stacked experts, as in transformers 5."""
    dense = [each for each in moe(layers, COUNT).parameters if ".experts." not in each.name]
    shapes = {"gate_up_proj": (COUNT, 96, 48), "gate_up_proj_bias": (COUNT, 96), "down_proj": (COUNT, 48, 48)}
    stacks = [
        parameter(f"model.layers.{layer}.mlp.experts.{name}", shape, "models.Experts")
        for layer in range(layers)
        for name, shape in shapes.items()
    ]
    return ModelSpec("stacked moe", (*dense, *stacks, *more))


def plan(experts: Any, model: ModelSpec | None = None, world: int = 4, stage: int = 3, **rest: Any) -> Plan:
    written = at(stage) | rest
    if experts is not None:
        written["experts"] = experts if isinstance(experts, dict) else {"ranks": experts}
    return make_plan(written, model or stacked(), world)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_has_its_own_experts_and_their_axis(stage: int) -> None:
    made = plan(2, stage=stage)
    divided = [row for row in made.rows if row.parts > 1]
    names = {row.name.rpartition(".")[2] for row in divided}
    assert names == {"gate_up_proj", "gate_up_proj_bias", "down_proj"}
    assert all(".experts." in row.name for row in divided) and len(divided) == 6
    row = made.row("model.layers.0.mlp.experts.down_proj")
    assert row is not None and row.shape == (3, 48, 48) and row.whole_shape == (6, 48, 48)
    assert row.whole_numel == 2 * row.numel
    for segment in made.segments:
        mine = {made.rows[number].parts for number in segment.rows}
        assert mine == ({2} if segment.axis == "expert_shard" else {1})
        assert made.slices(segment) == (2 if segment.axis == "expert_shard" else 4)
    axes = {call.axis for call in collectives(made)}
    assert axes == {"shard", "expert_shard"}


def test_nothing_changes_where_no_expert_axis_is() -> None:
    without, one = plan(None), plan(1)
    for part in ("rows", "segments", "units", "mesh"):
        assert getattr(one, part) == getattr(without, part)
    assert plan(2).digest != without.digest
    assert decode(MeshShape, encode(MeshShape(2, expert=2))) == MeshShape(2, expert=2)
    assert decode(MeshShape, {"shard": 2, "replicate": 1, "pipeline": 1}) == MeshShape(2)


def test_a_rank_pays_for_its_own_experts_only() -> None:
    without, spread = cost(plan(None, stage=0)), cost(plan(2, stage=0))
    experts = sum(row.numel for row in plan(None).rows if ".experts." in row.name)
    assert spread.parameters == without.parameters
    assert "expert_shard" in {line.axis for line in spread.traffic}
    # bf16 storage, two extra bytes of master, two moments in fp32: 12 bytes for each that went elsewhere.
    assert without.rest.total - spread.rest.total == pytest.approx(12 * experts / 2, rel=0.05)


MORE = "model.layers.0.mlp.experts"
STACK = stacked(1).parameters[-1]
TIE = replace(STACK, names=(STACK.name, "model.layers.1.mlp.experts.down_proj"), owners=STACK.owners * 2)
SCALED = stacked(1, parameter(f"{MORE}.scale", (2,)))
REFUSED: list[tuple[Any, ModelSpec, str]] = [
    (4, stacked(), "down_proj`: must have a first dimension of experts that 4 ranks divide evenly"),
    (3, stacked(), "`experts.ranks`: must divide the 4 ranks of a shard group; got 3"),
    (2, moe(), "experts.0.up_proj.weight`: must stack all experts of its layer"),
    (2, SCALED, f"scale`: must have the 6 experts of `{MORE}.gate_up_proj` beside it"),
    (2, ModelSpec("m", (*stacked(1).parameters[:-1], TIE)), "must not be tied"),
    ({"parameters": ["*_proj"]}, stacked(), "gate_up_proj_bias`: must be named in `experts.parameters`"),
    ({"parameters": ["*.mixture.*"]}, stacked(), "`experts.parameters`: must match a param"),
]


@pytest.mark.parametrize(("experts", "model", "shown"), REFUSED, ids=[said[:20] for *_, said in REFUSED])
def test_what_cannot_be_divided_is_refused_by_name(experts: Any, model: ModelSpec, shown: str) -> None:
    given = {"ranks": 2, **experts} if isinstance(experts, dict) else experts
    assert shown in error_of((ConfigError, MeshError), plan, given, model)


def test_what_does_not_go_with_experts_is_refused() -> None:
    divided = "must be left out where gradients are divided"
    keys = {"prescale_gradients": True, "gradient_predivide_factor": 2.0, "backend": "fsdp2"}
    for (key, value), told in zip(keys.items(), (divided, divided, "must be 1 or left out"), strict=True):
        assert plan(None, **{key: value}).mesh.expert == 1
        with pytest.raises(ConfigError, match=rf"`experts.ranks`: {told}"):
            plan(2, **{key: value})


def test_muon_gets_whole_matrices_of_its_own_experts() -> None:
    made = plan(2, optimizer={"type": "Muon", "params": {}})
    row = made.row(f"{MORE}.down_proj")
    expected = {"placement": "matrices", "optimizer": "Muon", "parallel": "expert"}
    assert row is not None and row.columns.options() == expected
    assert made.segments[row.segment].padded == 2 * 2 * 48 * 48


def block_keys(made: Plan, name: str, part: int) -> list[int]:
    """Return the seeds of rounding for each block of a row, on a mesh that cuts no slice of it."""
    row = made.row(name)
    assert row is not None
    spec = made.segments[row.segment]
    rows = tuple(made.rows[number] for number in spec.rows)
    keys = keys_of_blocks(rows, 0, spec.padded, part)
    return keys[row.offset // BLOCK : -(-(row.offset + row.numel) // BLOCK)].tolist()


def test_random_rounding_draws_the_same_bits_wherever_an_expert_is() -> None:
    whole, spread = plan(None, world=1), plan(2, world=2)
    name = f"{MORE}.down_proj"
    parts = [block_keys(spread, name, part) for part in (0, 1)]
    assert parts[0] + parts[1] == block_keys(whole, name, 0)
    # Blocks that would be cut are others, but never the same twice.
    parts = [block_keys(spread, f"{MORE}.gate_up_proj_bias", part) for part in (0, 1)]
    assert not set(parts[0]) & set(parts[1])


def test_a_rank_without_tokens_has_an_empty_sum() -> None:
    routing = TokenRouting(torch.zeros(0, 2, dtype=torch.long), COUNT)
    rows = routing.rows_of(torch.zeros(0, 5))
    assert routing.combine(rows, torch.zeros(0, 2)).shape == (0, 5)
