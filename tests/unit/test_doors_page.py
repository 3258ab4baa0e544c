"""The tables of docs/doors.md are those of the results, which are compared without flattery."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest

from tests.unit.tools import load_tool


@pytest.fixture(scope="module")
def doors() -> ModuleType:
    return load_tool("doors")


def test_the_page_shows_what_was_found_of_every_example(doors: Any) -> None:
    page, found = doors.PAGE.read_text(), doors.door_examples.results()
    for tables in (doors.door_examples, doors.door_methods, doors.door_suites):
        assert tables.table(tables.results()) in page
    examples = [(name, tool, example) for name, tool in doors.TOOLS.items() for example in tool.examples]
    known = {(name, example.name, stage) for name, _, example in examples for stage in (2, 3)}
    assert {row.key for row in found} == known and len(known) >= 2 * 24
    # DeepSpeed's own stages are as far apart there, which the page says below its table.
    apart = ["script: reward is 6e-06 from DeepSpeed at stage 3"]
    assert [row.trouble for row in found if row.trouble] in ([], apart)
    names = {"tests": "T", "data": "D", "out": "O", "stage": 3, "port": 29700, "file": "F"}
    for _, tool, example in examples:
        for text in (example.command, example.file, example.beside):
            assert bool(text.format(**names)) == bool(text), (tool.shown, example.name)


def test_numbers_are_compared_only_where_both_are_there_and_finite(doors: Any) -> None:
    assert doors.furthest([1.0, 4.0], [1.0, 2.0]) == 1.0 and doors.furthest([0.5], [0.25]) == 0.25
    assert doors.furthest([], []) is doors.furthest([1.0], [1.0, 2.0]) is None
    why = doors.door_examples.why_it_failed
    assert why(0, [1.0, 2.0]) == "" and why(0, [1.0, math.nan, math.inf]) == "2 of 3 losses are not finite"
    assert why(0, []) == "wrote no losses" and why(3, [math.nan]) == "exit code 3"
    assert why(None, []).startswith("not done in")
