"""Placement: packing of whole parameters, the parameters of Muon, and the report of both."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.models import EMBEDDING, LINEAR, at, moe, parameter, tied
from zerodrift import ConfigError, ModelSpec, Plan, cost, make_plan
from zerodrift.dtypes import BLOCK
from zerodrift.plan.layout import Packed, pack
from zerodrift.policy.parameters import not_hidden
from zerodrift.report.explanation import explain
from zerodrift.report.rows import group_rows
from zerodrift.report.terminal import plan_text

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}


def plan(model: ModelSpec | None = None, world: int = 2, rules: Any = (), **rest: Any) -> Plan:
    return make_plan({**at(3, rules=list(rules)), **rest}, model or moe(), world)


def options(made: Plan, name: str) -> dict[str, str]:
    row = made.row(name)
    assert row is not None
    return row.columns.options()


# --- packing ------------------------------------------------------------------------------------------


def ends(packed: Packed, sizes: list[int], slices: int) -> list[tuple[int, int]]:
    """Return the first and the last slice of each parameter."""
    each = packed[1] // slices
    pairs = zip(packed[0], sizes, strict=True)
    return [(offset // each, (offset + size - 1) // each) for offset, size in pairs if size]


SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_whole_parameters_are_never_cut_and_never_overlap(sizes: list[int], slices: int) -> None:
    parameters = [parameter(f"p{n}", (size,)) for n, size in enumerate(sizes)]
    offsets, padded = packed = pack(parameters, slices, "whole")
    assert packed == pack(parameters, slices, "whole")
    assert all(first == last for first, last in ends(packed, sizes, slices))
    end = 0
    for offset, size in sorted(zip(offsets, sizes, strict=True)):
        assert offset >= end and offset % BLOCK == 0
        end = offset + size
    assert end <= padded and padded % (slices * BLOCK) == 0
    blocks = [-(-size // BLOCK) for size in sizes]
    assert padded / slices <= BLOCK * (sum(blocks) / slices + max(blocks))


# --- in a plan ----------------------------------------------------------------------------------------


def test_a_rule_places_whole_and_the_rest_is_sliced() -> None:
    made = plan(rules=[{"match": "*.self_attn.*", "placement": "whole"}])
    assert options(made, "model.layers.0.self_attn.q_proj.weight") == {"placement": "whole"}
    assert options(made, "model.layers.0.mlp.gate.weight") == {}
    whole = [segment for segment in made.segments if segment.whole]
    assert len(whole) == 3 and all(len(segment.rows) == 4 for segment in whole)
    assert [segment.padded for segment in whole] == [2 * 2 * 48 * 48] * 3
    stack = ModelSpec("m", (parameter("layers.0.experts.up", (5, 16, 48), "models.Experts"),))
    made = plan(stack, rules=[{"match": "*", "placement": "matrices"}])
    assert made.segments[-1].padded // 2 % (16 * 48) == 0, "a rank's slice ends between matrices"
    made = plan(rules=[{"match": "*.q_proj.weight", "placement": "matrices"}])
    assert options(made, "model.layers.0.self_attn.q_proj.weight") == {"placement": "whole"}, "it is one"


def test_a_later_rule_wins_and_ties_get_the_wider_demand_and_what_is_frozen_none() -> None:
    rules = [{"match": "*", "placement": "whole"}, {"match": "lm_head.weight", "placement": "sliced"}]
    assert options(plan(rules=rules), "lm_head.weight") == {}
    assert options(plan(moe(tie=True), rules=rules), "lm_head.weight") == {"placement": "whole"}
    model = ModelSpec("m", (parameter("a", (64, 64), trained=False), parameter("b", (64, 64))))
    made = plan(model, rules=rules[:1])
    assert options(made, "a") == {} and options(made, "b") == {"placement": "whole"}, "frozen as ever"


# --- what it costs ------------------------------------------------------------------------------------


def test_the_padding_is_in_the_cost_and_in_a_note() -> None:
    """Two matrices of four million elements leave padding on six of eight ranks."""
    parameters = tuple(parameter(f"layers.0.{name}.w", (2048, 2048)) for name in "ab")
    made = plan(ModelSpec("m", parameters), 8, **MUON)
    bill = cost(made)
    assert bill.whole_padding == bill.padding == 6 * 2048 * 2048
    assert bill.rest.master == 2 * 2048 * 2048
    assert bill.rest.state == 4 * 2048 * 2048, "Muon has one moment"
    assert any("pads them by 300%" in note and "sharding.replicate" in note for note in made.notes)
    hybrid = plan(ModelSpec("m", parameters), 8, sharding={"replicate": 4}, **MUON)
    assert cost(hybrid).padding == 0 and not any("whole" in note for note in hybrid.notes)
    sliced = plan(ModelSpec("m", parameters), 8)
    assert cost(sliced).whole_padding == 0 and not any("padd" in note for note in sliced.notes)


# --- who gets Muon ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "klass", "expected"),
    [
        ("layers.0.q_proj.weight", (8, 8), LINEAR, ""),
        ("h.0.c_fc.weight", (8, 8), "transformers.pytorch_utils.Conv1D", ""),
        ("layers.0.experts.gate_up_proj", (4, 8, 8), "models.Experts", ""),
        ("layers.0.q_norm.weight", (4, 8), "models.Norm", "a norm"),
        ("layers.0.mlp.gate.weight", (4, 8), "models.TopK", "a router"),
        ("tokens.weight", (9, 8), EMBEDDING, "an embedding"),
        ("lm_head.weight", (9, 8), LINEAR, "an output head"),
        ("stem.conv.weight", (8, 3, 3, 3), "torch.nn.modules.conv.Conv2d", "a convolution"),
        ("layers.0.norm.weight", (8,), "models.Norm", "a vector, no matrix"),
    ],
)
def test_the_rule(name: str, shape: tuple[int, ...], klass: str, expected: str) -> None:
    assert not_hidden(parameter(name, shape, klass)) == expected
    assert not_hidden(tied(("out.weight", "embed.weight"), (9, 8), (LINEAR, EMBEDDING))) == "an embedding"


def test_the_rule_is_printed_and_can_be_overruled() -> None:
    rules = [
        {"match": "*.mlp.gate.weight", "optimizer": "Muon"},
        {"match": "*.o_proj.weight", "optimizer": "AdamW"},
    ]
    made = plan(rules=rules, **MUON)
    gate, out = "model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.o_proj.weight"
    assert options(made, gate) == {"placement": "whole", "optimizer": "Muon"}
    assert options(made, out) == {"optimizer": "AdamW"}
    decided = {decision.key: decision for decision in made.policy.decisions}
    assert "embeddings" in decided["optimizer"].why and decided["optimizer"].value.startswith("Muon")
    row = made.row(out)
    assert row is not None and row.columns.reasons()["optimizer"] == "precision.rules[1]: '*.o_proj.weight'"
    text = plan_text(made, cost(made), group_rows(made), color=False)
    assert "whole, Muon" in text and "a rank's slice holds whole parameters" in text
    assert len(explain(made, gate).slices) == 1, "one rank owns all of it"
    whole = plan(world=1, rules=[{"match": "*", "placement": "whole"}])
    assert plan(world=1).digest != whole.digest, "also where the offsets are the same"


@pytest.mark.parametrize(
    ("rule", "rest", "message"),
    [
        ({"match": "*.q_proj.weight", "placement": "sliced"}, MUON, "`placement` must be"),
        ({"match": "model.norm.weight", "optimizer": "Muon"}, MUON, "must be for matrices; got"),
        ({"match": "*.q_proj.weight", "optimizer": "Muon"}, {}, "`optimizer` must be left out of rules"),
        ({"match": "*.q_proj.weight", "placement": "whole"}, {"backend": "fsdp2"}, "on backend fsdp2"),
        ({"match": "model.norm.weight", "state": "bf16"}, MUON, "beta2 of at most"),
    ],
)
def test_what_cannot_be_is_refused(rule: dict[str, Any], rest: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(rules=[rule], **rest)
    # The bound on beta2 is about second moments, which Muon has not.
    assert plan(rules=[{"match": "*.q_proj.weight", "state": "bf16"}], **MUON)
