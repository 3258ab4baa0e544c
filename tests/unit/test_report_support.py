"""The support table in text, Markdown and JSON: complete, narrow enough, every refusal with its reason."""

from __future__ import annotations

import json
import re

import pytest

from zerodrift.policy.decisions import State
from zerodrift.policy.support import narrow_storages, states, table
from zerodrift.record import encode
from zerodrift.report.as_json import support_json
from zerodrift.report.support import support_markdown, support_text

CELLS = table()
STATES = states()


def test_text_fits_and_is_plain() -> None:
    text = support_text(CELLS, STATES, color=False)
    assert "\x1b" not in text
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize("width", [50, 80, 100, 120])
def test_text_holds_every_cell_at_any_width(width: int) -> None:
    lines = support_text(CELLS, STATES, color=False, width=width).splitlines()
    assert max(map(len, lines)) <= width
    modes = list(dict.fromkeys(cell.mode for cell in CELLS))
    mode = backend = ""
    found, kinds, places = [], [""], [(False, 0)]
    for line in lines[: lines.index("reasons")]:
        kinds = re.findall("with(?:out)? a pipeline", line) or kinds
        if stages := re.findall(r"stage (\d)", line):
            each = len(stages) // len(kinds)
            places = [
                (kinds[place // each] == "with a pipeline", int(stage)) for place, stage in enumerate(stages)
            ]
        backend = line.removeprefix("backend ") if line.startswith("backend ") else backend
        words = line.split()
        if line[:1].strip() and words[0] in modes:
            mode = words.pop(0)
        if words and words[0] in ("default", "fp32", "bf16", "fp16") and backend:
            statuses = [word for word in words[1:] if word in ("yes", "narrow", "no")]
            found += [
                (backend, mode, words[0], *place, status)
                for place, status in zip(places, statuses, strict=True)
            ]
    expected = {(c.backend, c.mode, c.accumulate, c.pipeline, c.stage, c.status) for c in CELLS}
    assert len(found) == len(expected) == len(CELLS)
    assert set(found) == expected


def test_every_reason_is_lettered_and_used() -> None:
    reasons = {cell.reason for cell in CELLS if cell.reason}
    text = support_text(CELLS, STATES, color=False)
    joined = " ".join(text.split())
    assert all(reason in joined for reason in reasons)
    used = set(
        re.findall(r"\b(?:no|narrow) ([a-z]{1,2})\b", text.split("backend native")[1].split("reasons")[0])
    )
    assert len(used) == len(reasons)


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
    text = " ".join(support_text(CELLS, STATES, color=False).split())
    for cell in STATES:
        assert cell.reason in page and cell.reason in text
    assert "with beta2 0.999: no" in lines[1] and "with beta2" not in "".join(lines[2:])
