"""The table of docs/doors.md is that of the results, and `make doors` goes on after a failure."""

from __future__ import annotations

import math
import os
import subprocess
import time
from pathlib import Path
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


@pytest.fixture
def apart(doors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `doors` with its files outside of the repository."""
    (tmp_path / "page.md").write_text("<!-- doors -->\n<!-- end of doors -->\n")
    monkeypatch.setattr(doors, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(doors.door_examples, "RESULTS", tmp_path / "results.json")
    return doors


def made_python(name: str, home: Path) -> Path:
    """Write an interpreter that always prints a version."""
    python = home / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text("#!/bin/sh\necho 0.19.6\n")
    python.chmod(0o755)
    return python


def test_a_failure_ends_nothing_else_and_what_ran_is_kept(
    apart: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One tool has no environment, and one cell of another fails; the second time only that cell runs."""
    ran = []

    def made(name: str, home: Path, torch: Any) -> Path:
        if name == "lightning":
            raise subprocess.CalledProcessError(1, ["pip", "install", "lightning"])
        return made_python(name, home)

    def run(cell: Any, *_: Any) -> Any:
        ran.append(str(cell))
        fails = cell.stage == 3 and cell.on == "zerodrift" and cell.example.name == "`deepspeed`"
        losses, why = ([], "exit code 1") if fails else ([1.0, 2.0], "")
        return apart.door_examples.Outcome(losses, why, "2026-11-23", cell.asked)

    monkeypatch.setattr(apart, "made", made)
    monkeypatch.setattr(apart.door_examples, "run", run)
    home = tmp_path / "all"
    assert apart.try_all(home, ["lightning", "deepspeed"], "", []) == 1
    failed = f"{apart.TOOLS['deepspeed'].shown}: `deepspeed`, stage 3 on zerodrift"
    assert len(ran) == 8 and failed == ran[-1]
    told = capsys.readouterr().out
    assert "`torchrun`, stage 2 on DeepSpeed ... 2 numbers" in told
    log = home / "deepspeed" / "doors" / "1-3-zerodrift.log"
    for said in ("1 of 3 examples ran at stages 2 and 3", str(home / "lightning.log"), f"see {log}"):
        assert said in " ".join(told.splitlines()[-3:])
    rows = [(row.ran, row.apart) for row in apart.door_examples.results()]
    assert rows == [*[(True, 0.0)] * 3, (False, None)]
    assert "`deepspeed` at stage 3" in apart.PAGE.read_text()
    assert apart.try_all(home, ["deepspeed"], "torchrun", []) == 0 and len(ran) == 8
    assert apart.try_all(home, ["deepspeed"], "", []) == 1 and ran[8:] == [failed]


def test_numbers_are_compared_only_where_both_are_there_and_finite(doors: Any) -> None:
    assert doors.furthest([1.0, 4.0], [1.0, 2.0]) == 1.0 and doors.furthest([0.5], [0.25]) == 0.25
    assert doors.furthest([], []) is doors.furthest([1.0], [1.0, 2.0]) is None
    why = doors.door_examples.why_it_failed
    assert why(0, [1.0, 2.0]) == "" and why(0, [1.0, math.nan, math.inf]) == "2 of 3 losses are not finite"
    assert why(0, []) == "wrote no losses" and why(3, [math.nan]) == "exit code 3"
    assert why(None, []).startswith("not done in")


def test_nothing_of_a_command_is_left(doors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ignores Ctrl-C, and has started a process in a session of its own."""
    monkeypatch.setattr(doors.door_examples.processes, "GRACE", 0.1)
    script = f"trap '' INT; setsid sleep 100 & echo $! > {tmp_path}/pid; wait"
    with (tmp_path / "log").open("w") as log:
        assert doors.door_examples.processes.run(["sh", "-c", script], os.environ, tmp_path, log, 0.5) is None
        pid = int((tmp_path / "pid").read_text())
        until = time.monotonic() + 10
        while pid in doors.door_examples.processes.there_are() and time.monotonic() < until:
            time.sleep(0.01)
        assert pid not in doors.door_examples.processes.there_are()
        assert doors.door_examples.processes.run(["sh", "-c", "exit 3"], os.environ, tmp_path, log, 60) == 3


def test_saved_files_are_compared_by_names_shapes_and_norms(doors: Any) -> None:
    compare, two = doors.door_methods.compare_files, {"w": [[2], 1.0]}
    assert compare(two, {"w": [[2], 1.0001]}) == ""
    assert compare({"w": [[0], 0.0]}, two) == "`w` is [0] and [2] on DeepSpeed"
    assert "the norm of `w` is 1 and 2" in compare(two, {"w": [[2], 2.0]})
    assert "only in the files of DeepSpeed" in compare({}, two)


def test_the_tests_of_another_package_count_where_deepspeed_passes_them(doors: Any) -> None:
    suites = doors.door_suites
    there = dict.fromkeys(("f.py::a", "f.py::b", "g.py::d"), ("passed", "")) | {"f.py::c": ("failed", "x")}
    gone = "ImportError: cannot import name 'X' from 'deepspeed.y'"
    lacks = "AttributeError: 'E' object has no attribute 'z'"
    here = {"f.py::a": ("passed", ""), "f.py::b": ("failed", lacks), "f.py::c": ("passed", "")}
    here["g.py"] = "failed", gone
    assert suites.compare("S", here, there) == [
        suites.SuiteResult("S", "f.py", 2, 1, 1, {"no `z`": 1}),
        suites.SuiteResult("S", "g.py", 1, 0, 0, {"no `X`": 1}),
    ]
    assert "| S | `f.py` | 2 | 1 of 2 | 1: no `z` |" in suites.table(suites.compare("S", here, there))
    absent = "NotHereError: `engine._x`: must be a name of the drop-in"
    assert suites.reason(("failed", absent)) == "asks for the private `engine._x`"


def test_files_of_a_suite_are_chosen_by_their_paths(doors: Any, tmp_path: Path) -> None:
    suite = doors.door_suites.Suite("deepspeed", (), (), ("unit/zero", "unit/comm/test_dist.py"), "tests")
    for name in ("zero/test_a.py", "zero/deep/test_dist_b.py", "zero/data.py", "other/test_dist.py"):
        path = tmp_path / "tests" / "unit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert suite.choose(tmp_path, "") == suite
    chosen = suite.choose(tmp_path, "dist")
    assert chosen.files == ("unit/zero/deep/test_dist_b.py", "unit/comm/test_dist.py")
    assert suite.choose(tmp_path, "nothing").files == ()
