"""The HTML page and the JSON: well-formed, self-contained, escaped, and as complete as the terminal."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.unit import handmade
from zerodrift.mesh import MeshShape
from zerodrift.plan.bill import cost
from zerodrift.plan.table import Plan
from zerodrift.policy.decisions import COLUMNS
from zerodrift.record import decode
from zerodrift.report import as_json
from zerodrift.report.explanation import Explanation, explain
from zerodrift.report.plan_html import plan_page
from zerodrift.report.rows import group_rows

VOID = {"meta", "input", "wbr", "rect", "link", "br", "img", "hr"}
EVIL = """<script>alert("1")</script>&'"""


class Reader(HTMLParser):
    """A parser that checks nesting, and keeps text, attributes and ids."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(name)
        self.attributes += attributes
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        if name not in VOID:
            assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text.append(data)


def page(plan: Plan) -> str:
    return plan_page(plan, cost(plan), group_rows(plan))


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


PLANS = {
    "mixture of experts": handmade.moe(layers=4),
    "one parameter": handmade.plan([handmade.param("weight", (3, 4), handmade.columns())], MeshShape()),
    "hostile names": replace(
        handmade.plan(
            [handmade.param(f"layers.{EVIL}.weight", (3, 4), handmade.columns(why=EVIL), EVIL)],
            notes=[EVIL],
            ignored=((EVIL, EVIL),),
        ),
        source=EVIL,
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_the_page_is_well_formed_and_needs_nothing_else(plan: Plan) -> None:
    reader = read(page(plan))
    ids = [value for name, value in reader.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert reader.tags.count("html") == reader.tags.count("title") - reader.tags.count("g") == 1
    assert not re.search(r"https?:|//\w|url\(|@import|\ssrc=|<link|\shref=", page(plan))


def test_every_text_is_escaped() -> None:
    text = page(PLANS["hostile names"])
    reader = read(text)
    assert reader.tags.count("script") == 1
    assert "alert(" not in text.replace("&lt;script&gt;alert(", "")
    shown = "".join(reader.text)
    assert shown.count(EVIL) >= 5


def test_the_page_says_what_the_terminal_says() -> None:
    plan = PLANS["mixture of experts"]
    reader = read(page(plan))
    shown = "".join(reader.text)
    titles = [value or "" for name, value in reader.attributes if name == "title"]
    assert sum("precision.rules[0]: '*.gate.weight'" in title for title in titles) == len(COLUMNS) - 1
    for line in group_rows(plan).lines:
        assert line.pattern in shown
    for decision in plan.policy.decisions:
        assert decision.key in shown and decision.value in shown and decision.why in shown
    for text in [*(word for pair in plan.policy.ignored for word in pair), *plan.notes, plan.digest]:
        assert text in shown


def test_an_explanation_can_be_read_back_and_a_plan_has_the_totals_of_its_cost() -> None:
    plan = PLANS["mixture of experts"]
    found = explain(plan, "lm_head.weight")
    data = json.loads(as_json.explanation_json(found, plan))
    assert decode(Explanation, data["parameter"]) == found and data["digest"] == plan.digest
    assert [cell["column"] for cell in data["parameter"]["cells"]] == list(COLUMNS)
    bill = cost(plan)
    totals = json.loads(as_json.plan_json(plan, bill))["cost"]["totals"]
    assert totals == {"rest": bill.rest.total, "peak": bill.peak.total, "wire": bill.wire}
