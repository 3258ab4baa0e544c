"""The support table in text, Markdown and JSON: complete, narrow enough, every refusal with its reason."""

from __future__ import annotations

import json
import re

import pytest

from zerodrift.policy.decisions import State
from zerodrift.policy.support import narrow_storages, states, table
from zerodrift.record import encode
from zerodrift.report.as_json import support_json
from zerodrift.report.frame import markdown_text
from zerodrift.report.support import support_markdown

CELLS = table()
STATES = states()


def text(width: int = 100) -> str:
    return markdown_text(support_markdown(CELLS, STATES), color=False, width=width)


@pytest.mark.parametrize("width", [70, 100, 120])
def test_text_is_plain_and_holds_every_cell_at_any_width(width: int) -> None:
    lines = text(width).splitlines()
    assert max(map(len, lines)) <= width and "\x1b" not in "".join(lines)
    backend, mode, place, found = "", "", False, []
    for line in lines:
        words = line.split()
        if words[:1] == ["Backend"]:
            backend, place = words[1].rstrip(","), "with" in words
        elif words[:1] and words[0] in {cell.mode for cell in CELLS}:
            mode, accumulate, *rest = words
            statuses = [word for word in rest if word in ("yes", "narrow", "no")]
            found += [
                (backend, mode, accumulate, place, stage, status) for stage, status in enumerate(statuses)
            ]
    expected = {(c.backend, c.mode, c.accumulate, c.pipeline, c.stage, c.status) for c in CELLS}
    assert len(found) == len(expected) == len(CELLS) and set(found) == expected


def test_every_reason_is_lettered_and_used() -> None:
    reasons = {cell.reason for cell in CELLS if cell.reason}
    page = support_markdown(CELLS, STATES)
    assert all(reason in page for reason in reasons)
    assert len(set(re.findall(r"\b(?:no|narrow) ([a-z]{1,2}) \|", page))) == len(reasons)


def test_markdown_is_tables_of_equal_width() -> None:
    text = support_markdown(CELLS, STATES)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {7}
    assert len(rows) == 4 * (20 + 2)
    for reason in {cell.reason for cell in CELLS if cell.reason}:
        assert reason in text


def test_json_holds_the_cells() -> None:
    found = json.loads(support_json(CELLS, STATES))
    storages = encode(list(narrow_storages()))
    page = support_markdown(CELLS, STATES)
    excluded = found.pop("excluded")
    assert len(excluded) == len({(one["by"], one["what"]) for one in excluded}) > 20
    assert all(f"- **{one['what']}**: {one['reason']}. {one['do']}" in page for one in excluded)
    assert found == {"cells": encode(list(CELLS)), "states": encode(list(STATES)), "storages": storages}


def test_every_state_is_shown_with_its_size_and_its_refusals() -> None:
    page = support_markdown(CELLS, STATES)
    lines = [
        line
        for line in page.partition("## State\n")[2].partition("## Storage")[0].splitlines()
        if line.startswith("- ")
    ]
    assert [line.split("**")[1] for line in lines] == [str(state) for state in State]
    assert [float(line.split()[2]) for line in lines] == [4, 2, 2, 1 + 4 / 256]
    assert all(cell.reason in page for cell in STATES)
    assert "with beta2 0.999: no" in lines[1] and "with beta2" not in "".join(lines[2:])
