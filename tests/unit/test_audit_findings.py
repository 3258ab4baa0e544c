"""Findings over measurements: each kind, beside a healthy twin that differs in one number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.audit.networks import Decoder
from zerodrift.api import make_plan
from zerodrift.inspect.audit.estimates import PassResults, narrower_dtype_of
from zerodrift.inspect.audit.findings import find_defects
from zerodrift.inspect.audit.results import AuditFinding, CellReplay, Estimate, GradientLine, UpdateCost
from zerodrift.inspect.audit.rounding import Rounding
from zerodrift.inspect.audit.runs import Drift, Signals, Subject
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


AT = "blocks.0 at a.py:7"
COARSE = {"norm.weight": "bf16", "head.weight": "", "words.weight": ""}
RULED = plan("fp32", rules=[{"match": "head.weight", "storage": "bf16", "compute": "fp32"}])
WORTH = [Estimate(Choice("head.weight", "storage", ("head.weight",)), 1e-8)]
FLIPPED = {"total": replace(SOME, flips=20, choices=1000)}
ROUTED = {**FLIPPED, "routes": [{"blocks.0.up#0": torch.zeros(1000, 2)}]}
ROUTER = "blocks.0.up.weight"
RAN = frozenset(["blocks.1.up"])
"""Modules that ran in the measured passes."""
ZERO = line(norm=0.0, size=0.0, cosine=1.0)
USED, UNUSED = line(name="blocks.0.up.weight"), line(name="blocks.1.up.weight", norm=0.0, size=0.0)
TINY = line(name="blocks.0.up.bias", norm=1e-9, size=1e-6, cosine=0.0)
SHORT = [line(name="words.weight", size=3e-5), line(name=ROUTER, size=3e-5), line(name="norm.weight")]


def cost(**more: float) -> list[UpdateCost]:
    return [replace(UpdateCost("head.weight", 0.0, 0.0, 0.0, "fp32"), **more)]


class Tying(nn.Module):
    """A stand-in for a model of `transformers` whose config ties its embeddings."""

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


TWO, ONE, HELD = Tying(False), Tying(True), Decoder()
HELD.register_buffer("table", HELD.table.bfloat16())


@pytest.mark.parametrize(
    ("of", "seen", "found"),
    [
        (plan(), {"planned_places": [place(saturated=3)]}, ("overflow", AT)),
        (plan(), {"planned_places": [place()]}, None),
        (plan(), {"planned_places": [place(vanished=60, error=0.3, size=1.0)]}, ("underflow", AT)),
        (plan(), {"planned_places": [place(vanished=60, error=1e-6, size=1.0)]}, None),
        (plan(), {"coarse": COARSE}, ("rounded", "norm.weight")),
        (plan(), {"coarse": dict.fromkeys(COARSE, "bf16")}, None),  # all of a checkpoint in bf16
        (plan(), {"coarse": dict.fromkeys(COARSE, "")}, None),
        (plan(), {"own_places": [(place(error=1e-4, size=1.0), 1e-4)]}, ("narrow code", AT)),
        (plan(), {"own_places": [(place(size=1.0), 0.0)]}, None),
        (plan(), {}, None),
        (RULED, {"estimates": WORTH}, ("rounded", "head.weight")),
        (RULED, {}, ("rounded", "head.weight")),  # a rule is listed, however little its cell is worth
        (plan("bf16"), {"estimates": WORTH}, None),  # a cell that the mode has so
        (plan(), {"replayed": [replay("norm.weight", "storage", 8e-4, 4e-4)]}, ("rounded", "norm.weight")),
        (plan(), {"replayed": [replay("norm.weight", "storage", 8e-4, 9.9e-4)]}, None),
        (plan(), {"replayed": [replay("words.weight", "storage", 8e-4, 4e-4)]}, None),  # it is not small
        (plan(), {"replayed": [replay(ROUTER, "compute", 1e-3, 9.9e-4, 12)], **ROUTED}, ("routing", ROUTER)),
        (plan(), {"replayed": [replay(ROUTER, "compute", 1e-3, 9.9e-4, 12)], **FLIPPED}, None),
        (plan(), {"replayed": [replay(ROUTER, "compute", 1e-3, 9.9e-4, 1)], **ROUTED}, None),
        (plan(), {"gradients": [line(accumulate=5e-4)]}, None),
        # Half an ulp of bf16 is 2^-8 = 0.0039 of a number: a wire takes more only where gradients cancel.
        (plan(reduce="bf16"), {"gradients": [line(reduce=0.005)]}, ("reduce", "head.weight")),
        (plan(reduce="bf16"), {"gradients": [line(reduce=0.003)]}, None),
        (plan(), {"gradients": SHORT}, ("gradient", ROUTER)),  # a backward comes there first
        (plan(), {"gradients": [line(size=0.8)]}, None),
        (plan(), {"gradients": [line(), TINY]}, None),
        (plan(), {"updates": cost(lost=0.5)}, ("lost updates", "head.weight")),
        (plan(), {"updates": cost(stuck=0.9)}, ("stuck state", "head.weight")),
        (plan(), {"updates": cost(lost=0.01, stuck=0.1)}, None),
        (plan(), {"gradients": [ZERO]}, ("no gradient", "head.weight")),
        (plan(), {"gradients": [ZERO], "used": frozenset(["head.weight"])}, None),
        (plan(), {"gradients": [USED, UNUSED]}, None),  # an expert without tokens
        (plan(), {"gradients": [USED, UNUSED], "ran": RAN}, ("no gradient", "blocks.1.up.weight")),
        (plan(model=HELD), {"model": HELD}, ("narrow buffer", "table")),
        (plan(model=TWO), {"model": TWO}, ("untied", "head.weight")),
        (plan(model=ONE), {"model": ONE}, None),
    ],
)
def test_a_defect_is_found_and_its_healthy_twin_is_not(
    of: Plan, seen: dict[str, Any], found: tuple[str, str] | None
) -> None:
    assert kinds(told(of, **seen)) == ([] if found is None else [found])


def test_of_a_module_the_first_place_is_told_unless_a_later_one_weighs_more() -> None:
    first, later = place(error=1e-4), place(error=1e-4, line="a.py:9")
    for worth, where in ((2e-4, AT), (9e-4, "blocks.0 at a.py:9")):
        assert kinds(told(plan(), own_places=[(first, 1e-4), (later, worth)])) == [("narrow code", where)]


@pytest.mark.parametrize(
    ("cell", "seen", "kind"),
    [
        ({"reduce": "bf16"}, {"gradients": [line(reduce=1e-5)]}, "reduce"),
        ({"accumulate": "bf16", "reduce": "bf16"}, {"gradients": [line(accumulate=1e-5)]}, "accumulate"),
        ({"state": "8bit"}, {"updates": cost(underflow=1e-5)}, "stuck state"),
        ({"state": "8bit"}, {}, "stuck state"),
    ],
)
def test_a_column_of_the_update_that_a_rule_narrows_is_listed(
    cell: dict[str, str], seen: dict[str, Any], kind: str
) -> None:
    found = {each.kind: each for each in told(plan(rules=[{"match": "head.weight", **cell}]), **seen)}
    assert found[kind].where == "head.weight" and "precision.rules[0]" in found[kind].what  # type: ignore[index]
    assert "0.00100%" in found[kind].what or not seen  # type: ignore[index]
    assert not told(plan(**cell), **seen)


def test_one_finding_has_all_parameters_of_its_kind() -> None:
    found = told(plan(), gradients=[line(accumulate=2e-3), line(name="norm.weight", accumulate=5e-3)])
    assert kinds(found) == [("accumulate", "norm.weight")]
    assert found[0].parameters == ("norm.weight", "head.weight")
    assert "and 1 more" in found[0].what


def test_what_weighs_most_is_first() -> None:
    wild, calm = place(error=1e-4, module="head"), place(error=1e-4)
    found = told(
        plan(buffers="bf16"), gradients=[line(accumulate=1e-2)], planned_places=[place(saturated=1)],
        own_places=[(calm, 1e-4), (wild, float("nan"))],
    )  # fmt: skip
    order = [each.kind for each in found]
    assert order[:3] == ["overflow", "narrow code", "narrow code"] and "not finite" in found[1].what
    assert {*order[3:]} == {"accumulate", "narrow buffer"} and found[1].where == "head at a.py:7"


def test_what_values_tell_of_their_dtype() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0))
    narrowed = {"": values, "bf16": values.bfloat16(), "fp16": values.half().float()}
    assert all(narrower_dtype_of(each) == dtype for dtype, each in narrowed.items())
    for plain in (torch.ones(9), torch.zeros(9), 2.0 ** -torch.arange(1, 30), torch.arange(100.0)):
        assert narrower_dtype_of(plain) is None
