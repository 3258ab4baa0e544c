"""Findings over what was measured: each kind, beside a healthy twin of the same numbers but one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.audit.networks import Decoder
from zerodrift.api import make_plan
from zerodrift.inspect.audit.estimates import PassResults, narrower_dtype_of
from zerodrift.inspect.audit.findings import find_defects
from zerodrift.inspect.audit.results import AuditFinding, CellReplay, Estimate, GradientLine, UpdateCost
from zerodrift.inspect.audit.rounding import Rounding
from zerodrift.inspect.audit.run import Subject
from zerodrift.inspect.audit.signals import Drift, Signals
from zerodrift.inspect.audit.variants import Choice
from zerodrift.plan.table import Plan

NONE = Drift(0.0, 0.0, 0.0, 0.0, 100, 0.0, 0, 0)
SOME = replace(NONE, rms=1e-3)
MODEL = Decoder()


def plan(mode: str = "bf16", model: nn.Module = MODEL, **more: Any) -> Plan:
    config = {"precision": {"mode": mode, **more}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return make_plan(config, model)


def told(
    of: Plan,
    *,
    model: nn.Module = MODEL,
    gradients: Sequence[GradientLine] = (),
    updates: Sequence[UpdateCost] = (),
    replayed: Sequence[CellReplay] = (),
    total: Drift = SOME,
    routes: Sequence[dict[str, torch.Tensor]] = (),
    **more: Any,
) -> list[AuditFinding]:
    seen = PassResults(Signals(routes=list(routes)), NONE, Signals(), total, frozenset(), **more)
    return find_defects(of, Subject.of(model, None), seen, gradients, updates, replayed)


def kinds(found: Sequence[AuditFinding]) -> list[tuple[str, str]]:
    return [(each.kind, each.where) for each in found]


def place(**more: Any) -> Rounding:
    return replace(Rounding("blocks.0", "add", "a.py:7", numel=100, dtype="float16"), **more)


def line(**more: Any) -> GradientLine:
    return replace(GradientLine("head.weight", 0.9999, 0.01, 1.0, 1.0), **more)


def replay(name: str, cell: Any, alone: float, left: float, flips: int = 0) -> CellReplay:
    one = replace(NONE, rms=alone, flips=flips, choices=1000)
    return CellReplay(Choice(name, cell, (name,)), one, replace(NONE, rms=left))


def test_beyond_a_dtypes_range() -> None:
    assert kinds(told(plan(), planned_places=[place(saturated=3)])) == [("overflow", "blocks.0 at a.py:7")]
    assert told(plan(), planned_places=[place()]) == []


def test_numbers_that_vanish() -> None:
    lost = place(vanished=60, error=0.3, size=1.0)
    assert kinds(told(plan(), planned_places=[lost])) == [("underflow", "blocks.0 at a.py:7")]
    assert told(plan(), planned_places=[place(vanished=60, error=1e-6, size=1.0)]) == []


def test_values_that_were_rounded_before() -> None:
    some = {"norm.weight": "bf16", "head.weight": "", "words.weight": ""}
    assert kinds(told(plan(), coarse=some)) == [("rounded", "norm.weight")]
    assert told(plan(), coarse=dict.fromkeys(some, "bf16")) == [], "all of a checkpoint in bf16"
    assert told(plan(), coarse=dict.fromkeys(some, "")) == []


def test_what_values_tell_of_their_dtype() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0))
    assert narrower_dtype_of(values) == ""
    assert narrower_dtype_of(values.bfloat16()) == "bf16"
    assert narrower_dtype_of(values.half().float()) == "fp16"
    for plain in (torch.ones(9), torch.zeros(9), 2.0 ** -torch.arange(1, 30), torch.arange(100.0)):
        assert narrower_dtype_of(plain) is None


def test_code_that_narrows() -> None:
    lost = place(error=1e-4, size=1.0)
    assert kinds(told(plan(), own_places=[(lost, 1e-4)])) == [("narrow code", "blocks.0 at a.py:7")]
    assert told(plan(), own_places=[(place(size=1.0), 0.0)]) == []


def test_a_gradient_that_is_not_finite_is_no_reason_to_be_last() -> None:
    wild, calm = place(error=1e-4, module="head"), place(error=1e-4)
    found = told(plan(), own_places=[(calm, 1e-4), (wild, float("nan"))])
    assert kinds(found) == [("narrow code", "head at a.py:7"), ("narrow code", "blocks.0 at a.py:7")]
    assert "not finite" in found[0].what


def test_of_a_module_the_first_place_is_told_unless_a_later_one_weighs_more() -> None:
    first, later = place(error=1e-4), place(error=1e-4, line="a.py:9")
    found = told(plan(), own_places=[(first, 1e-4), (later, 2e-4)])
    assert kinds(found) == [("narrow code", "blocks.0 at a.py:7")]
    found = told(plan(), own_places=[(first, 1e-4), (later, 9e-4)])
    assert kinds(found) == [("narrow code", "blocks.0 at a.py:9")]


def test_buffers() -> None:
    cast = told(plan(buffers="bf16"))
    assert {each.kind for each in cast} == {"narrow buffer"}
    assert "table" in {each.where for each in cast}
    held = Decoder()
    held.register_buffer("table", held.table.bfloat16())
    assert kinds(told(plan(model=held), model=held)) == [("narrow buffer", "table")]
    assert told(plan()) == []


def test_a_rule_that_narrows() -> None:
    ruled = plan("fp32", rules=[{"match": "head.weight", "storage": "bf16", "compute": "fp32"}])
    worth = [Estimate(Choice("head.weight", "storage", ("head.weight",)), 1e-8)]
    assert kinds(told(ruled, estimates=worth)) == [("rounded", "head.weight")]
    assert told(ruled) == [], "a cell that is worth nothing"
    assert told(plan("bf16"), estimates=worth) == [], "a cell that the mode has so"


def test_a_small_tensor_that_is_worth_much() -> None:
    much = replay("norm.weight", "storage", 8e-4, 4e-4)
    assert kinds(told(plan(), replayed=[much])) == [("rounded", "norm.weight")]
    assert told(plan(), replayed=[replay("norm.weight", "storage", 8e-4, 9.9e-4)]) == []
    assert told(plan(), replayed=[replay("words.weight", "storage", 8e-4, 4e-4)]) == [], "it is not small"


def test_a_router() -> None:
    routes = [{"blocks.0.up#0": torch.zeros(1000, 2)}]
    total = replace(SOME, flips=20, choices=1000)
    many = replay("blocks.0.up.weight", "compute", 1e-3, 9.9e-4, flips=12)
    assert kinds(told(plan(), replayed=[many], routes=routes, total=total)) == [
        ("routing", "blocks.0.up.weight")
    ]
    assert told(plan(), replayed=[many], total=total) == [], "it does not route"
    few = replay("blocks.0.up.weight", "compute", 1e-3, 9.9e-4, flips=1)
    assert told(plan(), replayed=[few], routes=routes, total=total) == []


def test_accumulate() -> None:
    found = told(plan(), gradients=[line(accumulate=2e-3), line(name="norm.weight", accumulate=5e-3)])
    assert kinds(found) == [("accumulate", "norm.weight")]
    assert found[0].parameters == ("norm.weight", "head.weight")
    assert "and 1 more" in found[0].what
    assert told(plan(), gradients=[line(accumulate=5e-4)]) == []


def test_a_wire_takes_more_than_rounding_once_only_where_gradients_cancel() -> None:
    """Half an ulp of bf16 is 2^-8 = 0.0039 of a number."""
    narrow = plan(reduce="bf16")
    assert kinds(told(narrow, gradients=[line(reduce=0.005)])) == [("reduce", "head.weight")]
    assert told(narrow, gradients=[line(reduce=0.003)]) == []


def test_a_gradient_of_another_length() -> None:
    lines = [
        line(name="words.weight", size=3e-5),
        line(name="blocks.0.up.weight", size=3e-5),
        line(name="norm.weight"),
    ]
    found = told(plan(), gradients=lines)
    assert kinds(found) == [("gradient", "blocks.0.up.weight")], "a backward comes there first"
    assert told(plan(), gradients=[line(size=0.8)]) == []
    faint = line(name="blocks.0.up.bias", norm=1e-9, size=1e-6, cosine=0.0)
    assert told(plan(), gradients=[line(), faint]) == [], "it is zero but for rounding"


def test_updates() -> None:
    def cost(**more: float) -> list[UpdateCost]:
        return [replace(UpdateCost("head.weight", 0.0, 0.0, 0.0, "fp32"), **more)]

    assert kinds(told(plan(), updates=cost(lost=0.5))) == [("lost updates", "head.weight")]
    assert kinds(told(plan(), updates=cost(stuck=0.9))) == [("stuck state", "head.weight")]
    assert told(plan(), updates=cost(lost=0.01, stuck=0.1)) == []


def test_a_parameter_that_nothing_uses() -> None:
    zero = line(norm=0.0, size=0.0, cosine=1.0)
    assert kinds(told(plan(), gradients=[zero])) == [("no gradient", "head.weight")]
    assert told(plan(), gradients=[zero], used=frozenset(["head.weight"])) == []


def test_an_expert_that_no_token_was_sent_to() -> None:
    used, unused = line(name="blocks.0.up.weight"), line(name="blocks.1.up.weight", norm=0.0, size=0.0)
    assert told(plan(), gradients=[used, unused]) == []
    found = told(plan(), gradients=[used, unused], ran=frozenset(["blocks.1.up"]))
    assert kinds(found) == [("no gradient", "blocks.1.up.weight")], "it ran, with something else"


class Tying(nn.Module):
    """What `transformers` has of a model whose config ties its embeddings."""

    class config:  # noqa: N801
        tie_word_embeddings = True

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_embeddings_that_were_to_be_one() -> None:
    two, one = Tying(False), Tying(True)
    assert kinds(told(plan(model=two), model=two)) == [("untied", "head.weight")]
    assert told(plan(model=one), model=one) == []


def test_what_weighs_most_is_first() -> None:
    found = told(
        plan(), gradients=[line(accumulate=1e-2)], planned_places=[place(saturated=1)],
        own_places=[(place(error=1e-4, module="norm"), 1e-4)],
    )  # fmt: skip
    assert [each.kind for each in found] == ["overflow", "narrow code", "accumulate"]
