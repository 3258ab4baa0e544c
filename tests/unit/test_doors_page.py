"""The table of docs/doors.md is that of the results, and the results hold what the page promises."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def doors() -> Any:
    spec = importlib.util.spec_from_file_location("doors", ROOT / "docs" / "doors.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doors"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_was_found() -> None:
    page = doors()
    assert page.table(page.results()) in page.PAGE.read_text()


def test_losses_are_deepspeeds() -> None:
    page = doors()
    apart = {row.key: row.apart for row in page.results() if row.apart is not None}
    assert apart and {key: value for key, value in apart.items() if value > page.NEAR} == {}
    known = {(name, example.name) for name, tool in page.TOOLS.items() for example in tool.examples}
    assert {key[:2] for key in apart} <= known


def test_every_command_can_be_formed() -> None:
    page = doors()
    names = {"data": "D", "out": "O", "stage": 3, "port": 29700, "file": "F"}
    for tool in page.TOOLS.values():
        for example in tool.examples:
            for text in (example.command, example.file, example.beside):
                assert bool(text.format(**names)) == bool(text), (tool.shown, example.name)
