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
from zerodrift.report.blocks import BlockRow, PageCell, PageTable, Paragraph, show
from zerodrift.report.explanation import Explanation, explain, explain_row
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
    "frozen": handmade.plan([handmade.param("weight", (3, 4), handmade.frozen())]),
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


def test_every_cell_carries_its_reason() -> None:
    plan = PLANS["mixture of experts"]
    titles = [value or "" for name, value in read(page(plan)).attributes if name == "title"]
    lines = group_rows(plan).lines
    assert len(titles) == len(lines) * len(COLUMNS)
    pinned = sum("precision.rules[0]: '*.gate.weight'" in title for title in titles)
    assert pinned == len(COLUMNS) - 1, "all but `grad`, which autograd leaves"


def test_the_page_says_what_the_terminal_says() -> None:
    plan = PLANS["mixture of experts"]
    shown = "".join(read(page(plan)).text)
    for line in group_rows(plan).lines:
        assert line.pattern in shown
    for decision in plan.policy.decisions:
        assert decision.key in shown and decision.value in shown and decision.why in shown
    for text in [*(word for pair in plan.policy.ignored for word in pair), *plan.notes, plan.digest]:
        assert text in shown


def test_what_a_template_has_made_is_not_escaped_again() -> None:
    table = PageTable(("a",), [(PageCell("<a.b>" * 5, hover='"&<', badge="x"),)])
    name = "&lt;a.<wbr>b&gt;" * 5
    assert f'<td title="&quot;&amp;&lt;">{name} <span class="badge">x</span></td>' in show(table)
    assert f'<div class="pair">{show(Paragraph("<"))}</div>' in show(BlockRow([Paragraph("<")], "pair"))


# --- JSON -----------------------------------------------------------------------------------------------


def test_the_json_of_a_plan_has_a_line_per_row_and_the_totals_of_its_cost() -> None:
    plan = handmade.moe(layers=3)
    bill = cost(plan)
    text = as_json.plan_json(plan, bill)
    rows = [line for line in text.splitlines() if "block_sparse_moe.gate.weight" in line]
    assert sum('["model.layers' in line for line in rows) == 3
    data = json.loads(text)["cost"]
    assert data["totals"] == {"rest": bill.rest.total, "peak": bill.peak.total, "wire": bill.wire}
    assert data["rest"]["storage"] == bill.rest.storage and len(data["traffic"]) == len(bill.traffic)


def test_an_explanation_can_be_read_back_and_rows_are_explanations() -> None:
    plan = PLANS["mixture of experts"]
    found = explain(plan, "lm_head.weight")
    data = json.loads(as_json.explanation_json(found, plan))
    assert decode(Explanation, data["parameter"]) == found and data["digest"] == plan.digest
    assert [cell["column"] for cell in data["parameter"]["cells"]] == list(COLUMNS)
    data = json.loads(as_json.rows_json([explain_row(plan, index) for index in (0, 1)], plan))
    assert [item["names"][0] for item in data["parameters"]] == [row.name for row in plan.rows[:2]]
