"""The plan: units, layout, invariants that can fail, order of collectives, cost, JSON and digest."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.unit.models import EMBEDDING, NORM, at, moe, parameter, plan, tied
from zerodrift import ConfigError, ModelError, ModelSpec, Plan, cost
from zerodrift.dtypes import BLOCK, DType
from zerodrift.plan import check
from zerodrift.plan.schedule import Collective, Computation, collectives, events
from zerodrift.policy.decisions import Master


def units(made: Plan) -> list[str]:
    return [unit.name for unit in made.units]


def spec(*parameters: Any) -> ModelSpec:
    return ModelSpec("m", parameters)


# --- units ------------------------------------------------------------------------------------------


def test_small_segments_of_blocks_are_gathered_with_the_root_on_many_ranks() -> None:
    rules = [{"match": "*.norm.weight", "pin": "fp32"}]
    norms = [f"layers.{layer}.norm.weight" for layer in range(4)]
    parameters = [parameter("embed.weight", (1000, 4096), EMBEDDING)]
    for name in norms:
        parameters += [parameter(name, (4096,), NORM), parameter(name.replace("norm", "mlp"), (4096, 4096))]
    model = spec(*parameters)

    def made(world: int, **rest: Any) -> Plan:
        return plan(at(3, rules=rules) | rest, model, world)

    few, many = made(128), made(1024)
    assert all(few.units[row.unit].name.startswith("layers.") for row in few.rows if row.name in norms)
    assert [row.name for row in many.rows if row.name in norms and many.units[row.unit].name == ""] == norms
    assert len(few.segments) - len(many.segments) == 3
    named = made(1024, sharding={"units": ["layers.*"]})
    assert len(named.segments) == len(few.segments), "what a config names is gathered together"
    # A thousand blocks that are all small would gather the whole model at once.
    blocks = [parameter(f"layers.{layer}.mlp.weight", (256, 256)) for layer in range(200)]
    assert len(plan(at(3), spec(*blocks), 1024).units) == 201
    assert len(plan(at(3), spec(*blocks[:12]), 1024).units) == 1


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["0.weight", "2.weight"], [""]),
        (["h.0.attn.w", "h.1.attn.w", "wte.w"], ["", "h.0", "h.1"]),
        (["encoder.b.0.layer.0.q.w", "decoder.b.0.layer.1.q.w"], ["", "encoder.b.0", "decoder.b.0"]),
        (["stem.0.weight", "body.0.conv.weight"], ["", "body.0"]),
    ],
)
def test_blocks_are_found_and_the_root_takes_the_rest(names: list[str], expected: list[str]) -> None:
    assert units(plan(at(3), spec(*(parameter(name, (4, 4)) for name in names)))) == expected


def test_the_root_and_blocks_of_a_model_and_of_a_pipeline() -> None:
    made = plan(at(3), moe(layers=3))
    assert units(made) == ["", *(f"model.layers.{i}" for i in range(3))]
    root = [made.rows[i].name for i in made.units[0].rows]
    assert root == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    made = plan(at(3) | {"pipeline": {"stages": 2}}, moe(layers=4), world=4)
    blocks = [(stage, f"model.layers.{2 * stage + n}") for stage in (0, 1) for n in (0, 1)]
    assert [(u.stage, u.name) for u in made.units] == [(0, ""), *blocks[:2], (1, ""), *blocks[2:]]
    with pytest.raises(ConfigError, match=r"pipeline\.stages"):
        plan(at(3) | {"pipeline": {"stages": 8}}, moe(layers=3), world=8)


def test_units_can_be_named_and_the_innermost_wins() -> None:
    experts = "model.layers.*.mlp.experts.*"
    made = plan(at(3) | {"sharding": {"units": ["model.layers.*", experts]}}, moe(layers=2, experts=2))
    inside = [f"model.layers.0.mlp.experts.{n}" for n in (0, 1)]
    assert units(made)[1:4] == ["model.layers.0", *inside]
    with pytest.raises(ConfigError, match=r"sharding\.units\[0\].*model\.layers"):
        plan(at(3) | {"sharding": {"units": ["model.layer.*"]}})


def test_a_parameter_tied_across_units_lives_in_the_root() -> None:
    shared = tied(("layers.0.a.w", "layers.1.a.w"), (4, 4), ("A", "A"))
    inside = tied(("layers.0.b.w", "layers.0.c.w"), (4, 4), ("A", "A"))
    made = plan(at(3), spec(shared, inside, parameter("layers.1.z.w", (4,))))
    assert made.units[made.row("layers.1.a.w").unit].name == ""  # type: ignore[union-attr]
    assert made.units[made.row("layers.0.c.w").unit].name == "layers.0"  # type: ignore[union-attr]


# --- segments ---------------------------------------------------------------------------------------


def pinned_plan() -> Plan:
    rules = [{"match": "*.gate.weight", "pin": "fp32"}]
    return plan(at(3, rules=rules))


def test_rows_with_the_same_columns_share_a_segment() -> None:
    made = pinned_plan()
    block = made.units[1]
    assert len(block.segments) == 2
    pinned = made.segments[block.segments[1]]
    assert [made.rows[i].name for i in pinned.rows] == ["model.layers.0.mlp.gate.weight"]
    frozen = spec(parameter("a", (4,)), parameter("b", (4,), trained=False))
    assert len(plan(at(3), frozen).segments) == 2
    every = plan(at(1, reduce={"when": "every"}))
    assert every.rows[0].columns.cells()["accumulate"] == "fp32/"


def test_empty_and_scalar_parameters() -> None:
    made = plan(at(3), spec(parameter("none", (0, 4)), parameter("one", ()), parameter("w", (3,))))
    assert [(row.numel, row.offset) for row in made.rows] == [(0, 0), (1, 0), (3, 256)]
    with pytest.raises(ModelError, match="must have parameters"):
        plan(at(3), spec())


# --- checks can fail --------------------------------------------------------------------------------


def changed(made: Plan, part: str, index: int, **changes: Any) -> Plan:
    """Return the plan with another row, segment, unit or boundary."""
    items = list(getattr(made, part))
    items[index] = replace(items[index], **changes)
    return replace(made, **{part: tuple(items)})  # type: ignore[arg-type]


def with_columns(made: Plan, index: int, **changes: Any) -> Plan:
    return changed(made, "rows", index, columns=replace(made.rows[index].columns, **changes))


def with_update(made: Plan, index: int, **changes: Any) -> Plan:
    update = made.rows[index].columns.update
    assert update is not None
    return with_columns(made, index, update=replace(update, **changes))


def longer(made: Plan, number: int, more: int) -> Plan:
    """Lengthen a segment: its rows, or the ends of its slices, no longer fit."""
    return changed(made, "segments", number, padded=made.segments[number].padded + more)


def muon_plan() -> Plan:
    """Return a plan of whole rows, and of a stack of eight small matrices, on two ranks."""
    stack = parameter("model.layers.0.mlp.experts.up", (8, 16, 48), "models.Experts")
    return plan(at(3) | {"optimizer": {"type": "Muon", "params": {}}}, spec(*moe(layers=1).parameters, stack))


GATE = next(i for i, row in enumerate(pinned_plan().rows) if row.columns.pinned)
MUON = muon_plan()
MATRIX = next(i for i, row in enumerate(MUON.rows) if row.columns.options().get("optimizer") == "Muon")


def shifted() -> Plan:
    """Move a whole row by half a slice, across the end of its own."""
    row = next(i for i, row in enumerate(MUON.rows) if row.name.endswith("q_proj.weight"))
    each = MUON.segments[MUON.rows[row].segment].padded // 2
    return changed(MUON, "rows", row, offset=(each - 1) // BLOCK * BLOCK)


PLANTED: dict[str, Any] = {
    "segments_hold_their_rows": lambda p: changed(p, "rows", 1, offset=0),
    "no_slice_cuts_what_is_whole": lambda p: shifted(),
    "pins_hold_everywhere": lambda p: with_columns(p, GATE, compute=DType.BF16),
    "nothing_narrows_silently": lambda p: with_update(p, 0, master=Master.SPLIT, grad=DType.FP32),
    "every_cell_says_why": lambda p: with_columns(p, 0, why=()),
    "boundaries_hold_their_dtype": lambda p: changed(p, "boundaries", 0, dtype=DType.FP16),
}
PARTS: dict[str, Any] = {
    "no_slice_cuts_what_is_whole:": lambda p: longer(MUON, MUON.rows[-1].segment, 2 * BLOCK),
    "is no whole matrix for Muon": lambda p: changed(MUON, "rows", MATRIX, shape=(MUON.rows[MATRIX].numel,)),
    "no whole matrix for Muon": lambda p: with_update(MUON, MATRIX, placement="sliced"),
    "starts at 3 of segment 0": lambda p: changed(p, "rows", 0, offset=3),
    "differs from segment 0 in a column": lambda p: with_columns(p, 0, compute=DType.FP32),
}
"""Part of a violation's text -> a second way to break the check."""


def test_every_check_has_a_planted_violation() -> None:
    assert set(PLANTED) == {c.__name__ for c in check.CHECKS}
    assert check.find_violations(pinned_plan()) == check.find_violations(MUON) == []
    assert MUON.rows[-1].columns.options()["placement"] == "matrices"


@pytest.mark.parametrize("told", {**PLANTED, **PARTS})
def test_a_planted_violation_is_caught(told: str) -> None:
    broken = {**PLANTED, **PARTS}[told](pinned_plan())
    found = check.find_violations(broken)
    named = [text.startswith(told) if told in PLANTED else told in text for text in found]
    assert any(named), found
    with pytest.raises(AssertionError, match="breaks"):
        check.require(broken)


# --- collectives and cost ---------------------------------------------------------------------------


def test_the_order_of_a_stage_3_step() -> None:
    calls = collectives(plan(at(3), moe(layers=2)), 0, 1)
    assert [f"{c.purpose} {c.op} {c.dtype} {c.segment}" for c in calls] == [
        "forward all_gather bf16 0",
        "forward all_gather bf16 1",
        "forward all_gather bf16 2",
        "backward all_gather bf16 2",
        "backward all_gather bf16 1",  # ahead
        "reduce reduce_scatter fp32 2",
        "reduce reduce_scatter fp32 1",
        "reduce reduce_scatter fp32 0",
        "norm all_reduce int64 -1",
    ]
    made = plan(at(3) | {"sharding": {"replicate": 2}}, moe(layers=2), world=4)
    calls = [c for c in collectives(made, 0, 4) if c.axis == "replicate"]
    assert [c.segment for c in calls] == [2, 1, 0], "replicas are summed once per step"
    assert all(c.numel == made.segments[c.segment].padded // 2 for c in calls)


def test_a_nested_unit_is_gathered_once_and_before_it_computes() -> None:
    blocks = [parameter(f"layers.{n}.{name}.w", (8, 8)) for n in range(3) for name in ("a", "inner.b", "c")]
    model = spec(parameter("embed.w", (8, 8)), *blocks)
    made = plan(at(3) | {"sharding": {"units": ["layers.*", "layers.*.inner"]}}, model)
    held: set[tuple[str, int]] = set()
    for event in events(made, 0, 1):
        if isinstance(event, Computation) and event.work != "update":
            purpose = "backward" if event.work == "backward" else "forward"
            assert {(purpose, number) for number in made.units[event.unit].segments} <= held
            assert not event.back or any(each == "backward" for each, _ in held), "a gather ahead of the head"
        elif isinstance(event, Collective) and event.op == "all_gather":
            assert (event.purpose, event.segment) not in held
            held.add((event.purpose, event.segment))


def large(stage: int, written: dict[str, Any] | None = None) -> Plan:
    """Return a plan of one block of 2^20 elements and no root, for which the formulas of a step are exact."""
    model = spec(parameter("layers.0.a.w", (1024, 1024)))
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return plan({**at(stage), **optimizer, **(written or {})}, model, 8)


@pytest.mark.parametrize(
    ("stage", "written", "per_parameter"),
    [
        (0, {}, 2 + 2 + 8 + 2 / 64),
        (2, {}, 2 + (2 + 8) / 8 + 2 / 64),
        (3, {}, 12 / 8),
        (3, {"sharding": {"accumulator": "keep"}}, 16 / 8),
        (3, {"precision": {"mode": "bf16", "state": "bf16-stochastic"}}, (8 + 8 / 256) / 8),
        (3, {"precision": {"mode": "bf16", "state": "8bit"}}, (4 + 2 * (1 + 4 / 256) + 8 / 256) / 8),
        (3, {"precision": {"mode": "fp32"}}, 12 / 8),
        (1, {"sharding": {"accumulator": "keep"}, "precision": {"mode": "fp16"}}, 2 + 4 + 12 / 8 + 2 / 64),
    ],
)
def test_bytes_at_rest_follow_the_formulas(stage: int, written: dict[str, Any], per_parameter: float) -> None:
    assert cost(large(stage, written)).rest.total == per_parameter * 2**20


def test_moments_follow_the_optimizer_and_buffers_count() -> None:
    rest = cost(plan(at(0))).rest
    assert rest.buffers and rest.total == sum(getattr(rest, each.name) for each in fields(rest))
    momentum = {"momentum": 0.9}
    for kind, params, values in (("Lion", {}, 1), ("SGD", {}, 0), ("SGD", momentum, 1), ("Adam", {}, 2)):
        made = large(0, {"optimizer": {"type": kind, "params": params}})
        assert cost(made).rest.state == values * 4 * 2**20


def test_the_peak_holds_two_units_and_two_gradients() -> None:
    model = spec(*(parameter(f"layers.{i}.a.w", (1024, 1024)) for i in range(4)))
    in_turn = {"precision": {"mode": "bf16", "reduce": {"order": "rank"}}}
    bill = cost(plan(at(3) | in_turn, model, world=4))
    assert bill.peak.gathered == 2 * 2 * 2**20
    assert bill.peak.gradient == (1 + 2) * 4 * 2**20  # as autograd leaves one; what two are reduced from
    assert bill.peak.accumulate == 4 * 2**20
    assert bill.peak.wire == 2 * (3 + 1) * 2**20  # of two: three quarters received, one summed
    waiting = cost(plan(at(1) | in_turn, model, world=4), 2)
    assert waiting.peak.accumulate == 4 * 4 * 2**20 + 4 * 2**20
    assert cost(plan(at(0) | in_turn, model, world=4), 2).peak.accumulate == 4 * 4 * 2**20
    kept = cost(plan(at(3) | {"sharding": {"keep_gathered": "step"}}, model, world=4))
    assert kept.peak.gathered == 4 * 2 * 2**20
    # Whole fp32 storage pays for its low copy under autocast.
    assert cost(plan(at(1, "autocast-bf16"), model)).peak.gathered == 2 * 2 * 2**20
    assert cost(plan(at(1, "fp32"), model)).peak.gathered == 0


# --- a plan is a value ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_json_round_trip_and_digest(stage: int) -> None:
    made = plan(at(stage), moe(tie=True))
    back = Plan.from_json(json.loads(json.dumps(made.to_json())))
    assert back == made and back.digest == made.digest
    assert plan(at(stage), moe(tie=True)).digest == made.digest
    assert made.row("lm_head.weight") is made.row("model.embed_tokens.weight") is not None
    assert made.row("nothing") is None
    named = at(stage) | {"sharding": {"units": ["model.layers"]}}
    changes = (at(stage, "fp32"), at(stage) | {"gradient_clipping": 0.5}, named)
    digests = {plan(written).digest for written in (at(stage), *changes)} | {plan(at(stage), world=4).digest}
    assert len(digests) == 5, "every decision changes it"
