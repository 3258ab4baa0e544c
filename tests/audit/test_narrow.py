"""Narrow formats in an audit: what a plan has is what its replays run, and those that are chosen pay."""

from __future__ import annotations

import html
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tests.audit.networks import VOCABULARY, Decoder
from tests.audit.planted import words
from zerodrift.api import make_plan
from zerodrift.dtypes import ADMITTED, parse_among
from zerodrift.inspect.audit import variants
from zerodrift.inspect.audit.advice import Trials, bytes_of
from zerodrift.inspect.audit.entry import audit
from zerodrift.inspect.audit.estimates import AuditSetup, run_three_passes
from zerodrift.inspect.audit.report import Audit, audit_page
from zerodrift.inspect.audit.results import FormatPoint, rules_text
from zerodrift.inspect.audit.runs import Subject, drift
from zerodrift.inspect.audit.variants import Choice
from zerodrift.plan.bill import cost
from zerodrift.plan.table import Plan

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def decoder(frozen: bool = False) -> nn.Module:
    """Return a decoder, with all linear layers of its blocks but one `frozen`, as under adapters."""
    torch.manual_seed(0)
    model = Decoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith("blocks") or name.endswith("down.weight"))
    return model


def planned(model: nn.Module, precision: dict[str, Any], stage: int = 0) -> Plan:
    given = {"mode": "bf16", **precision}
    config = {"precision": given, "optimizer": ADAMW, "zero_optimization": {"stage": stage}}
    return make_plan(config, model)


@pytest.mark.parametrize(
    ("precision", "frozen", "stage", "mode", "cell"),
    [
        ({"gather": "fp8"}, False, 3, "autocast-bf16", "storage"),
        ({"frozen": "nf4"}, True, 0, "bf16", "storage"),
        ({"compute": "fp8"}, False, 0, "autocast-bf16", "compute"),
    ],
)
def test_replays_of_a_narrow_plan_have_its_formats(
    precision: dict[str, str], frozen: bool, stage: int, mode: str, cell: variants.Cell
) -> None:
    model = decoder(frozen)
    plan = planned(model, precision, stage)
    setup = AuditSetup(
        Subject.of(model, None), variants.without_update(plan.policy), plan.mesh, words(VOCABULARY, count=1)
    )
    passes, ran = run_three_passes(setup)
    ran = replace(ran, policy=setup.policy)
    again = setup.signals(setup.policy)
    assert torch.equal(again.values, passes.planned.values)
    name = "blocks.0.up.weight"
    row = ran.row(name)
    assert row is not None
    choice = Choice(name, cell, (name,))
    alone = drift(setup.signals(variants.isolated_policy(ran, choice)), passes.reference)
    wide = drift(setup.signals(variants.widened_policy(ran, choice)), passes.reference)
    estimate = next((each for each in passes.estimates if each.choice == choice and row.trained), None)
    assert 0.05 < alone.rms / passes.total.rms < 0.9
    assert wide.rms > 0.5 * passes.total.rms  # the other matrices keep their format
    assert estimate is None or cell == "compute" or 0.4 < estimate.rms / alone.rms < 2.5
    start = FormatPoint(passes.total, bytes_of(setup, plan.policy))
    trials = Trials(setup, ran, plan.policy, passes.reference, start, lambda *_: None)
    other = trials.point([], type(plan.policy.mode)(mode))
    assert other is not None and other.drift.rms > 0.7 * passes.total.rms
    assert (other.drift == passes.total) == (mode == str(plan.policy.mode))


def test_a_narrow_wire_is_measured_on_one_rank() -> None:
    model = decoder()
    plan = planned(model, {"reduce": {"wire": "int4"}})
    found = {
        line.name: line.reduce for line in audit(plan, model, words(VOCABULARY, count=2), confirm=0).gradients
    }
    assert 0.03 < found["head.weight"] < 0.3 and not found["norm.weight"]


# --- the search ------------------------------------------------------------------------------------------

CHANNEL, OUTLIER = 3, 40.0


def with_outliers() -> nn.Module:
    """Return a decoder with frozen layers. One input channel of `up` has large weights and, by the norm
    before it, small activations: blocks with one scale lose the other channels, and nothing else is harder
    to round."""
    model = decoder(frozen=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("up.weight"):
                parameter[:, CHANNEL] *= OUTLIER
            elif ".between." in name:
                parameter[CHANNEL] /= OUTLIER
    return model


def chosen(found: Audit) -> dict[str, str]:
    """Return the chosen format of each pattern."""
    assert found.formats is not None
    trials = found.formats.trials
    return {trials[number].pattern: trials[number].format for number in found.formats.taken}


def test_a_matrix_with_outliers_gets_no_format_that_it_does_not_bear() -> None:
    model = with_outliers()
    plan = planned(model, {})
    found = audit(plan, model, words(VOCABULARY, count=2), budget=None, confirm=0, narrow="bytes:2.2x")
    advice = found.formats
    assert advice is not None and chosen(found) == {
        "blocks.*.attention.mixed.weight": "int8",
        "blocks.*.attention.out.weight": "int8",
        "blocks.*.up.weight": "fp8",
    }
    assert advice.start.drift == found.drift and advice.limit == 2.2 * found.drift.rms
    assert all(advice.trials[number].together is not None for number in advice.taken)
    worst = max(trial.alone.drift.rms for trial in advice.trials if trial.alone is not None)
    assert advice.chosen.drift.rms <= advice.limit < worst
    # The rules, as they are printed, make the plan that was run.
    text = rules_text(advice.rules)
    printed, page = found.text(), audit_page(found)
    assert text in printed and text == found.to_json()["formats"]["config"]
    assert "Narrow formats" in page and all(html.escape(pattern) in page for pattern in chosen(found))
    pasted = planned(model, yaml.safe_load(text)["precision"])
    narrow = {row.name: row.columns.storage.dtype for row in pasted.rows if row.columns.storage.dtype.format}
    assert narrow == {
        pattern.replace("*", number): parse_among(word, ADMITTED["frozen"])
        for pattern, word in chosen(found).items()
        for number in "01"
    }
    again = audit(pasted, model, words(VOCABULARY, count=2), budget=None, confirm=0)
    assert again.drift == advice.chosen.drift
    assert cost(pasted).rest.total == advice.chosen.bytes.rest < advice.start.bytes.rest
