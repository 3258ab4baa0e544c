"""The JSON of a plan: readable by `Plan.from_json`, with digest and cost, a line per row, always the same."""

from __future__ import annotations

import json

from tests.unit import handmade
from zerodrift.policy.decisions import COLUMNS
from zerodrift.record import decode
from zerodrift.report import as_json
from zerodrift.report.explanation import Explanation, explain, explain_row

PLAN = handmade.moe(layers=3)


def test_a_row_is_a_line() -> None:
    lines = as_json.plan_json(PLAN, handmade.cost(PLAN)).splitlines()
    assert sum("block_sparse_moe.gate.weight" in line and '["model.layers' in line for line in lines) == 3


def test_the_cost_has_its_totals() -> None:
    cost = handmade.cost(PLAN)
    data = json.loads(as_json.plan_json(PLAN, cost))["cost"]
    assert data["totals"] == {"rest": cost.rest.total, "peak": cost.peak.total, "wire": cost.wire}
    assert data["rest"]["storage"] == cost.rest.storage
    assert len(data["traffic"]) == len(cost.traffic)


def test_an_explanation_can_be_read_back() -> None:
    found = explain(PLAN, "lm_head.weight")
    data = json.loads(as_json.explanation_json(found, PLAN))
    assert decode(Explanation, data["parameter"]) == found
    assert data["digest"] == PLAN.digest
    assert [cell["column"] for cell in data["parameter"]["cells"]] == list(COLUMNS)


def test_rows_are_explanations() -> None:
    data = json.loads(as_json.rows_json([explain_row(PLAN, index) for index in (0, 1)], PLAN))
    assert [item["names"][0] for item in data["parameters"]] == [row.name for row in PLAN.rows[:2]]
