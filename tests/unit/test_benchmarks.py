"""What a benchmark prints is what it keeps."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules of the folder, by name."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    return SimpleNamespace(result=importlib.import_module("result"))


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"beside": "nothing", "save": None, **given})


# --- what was found is kept ---------------------------------------------------------------------------------


def test_what_is_printed_is_kept_in_full(
    bench: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["/somewhere/bench/step.py", "--only", "a b", "--save", "x", "--beside=nothing", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(bench.result, "RESULTS", tmp_path)
    result = bench.result.Result.begin("Two ranks", options(), "torch", "no-such-package")
    table = result.table({"engine": "<12", "ms": ".1f", "part": ".0%", "said": "<4"}, "first")
    table.row("ours", 1 / 3, 0.5, "[one], two")
    table.row("theirs", None, 1, "-")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Two ranks" and "no-such-package not installed" in printed[1]
    assert [line.split() for line in printed[-3:]] == [
        ["engine", "ms", "part", "said"],
        ["ours", "0.3", "50%", "[one],", "two"],
        ["theirs", "-", "100%", "-"],
    ]
    result.save("x")
    found = bench.result.read(tmp_path / "x.json")
    assert found == result
    assert found.tables[0].rows[0] == ["ours", 1 / 3, 0.5, "[one], two"]
    assert found.command == "python bench/step.py --only 'a b' --rounds 2"
    assert '["theirs", null, 1, "-"]' in (tmp_path / "x.json").read_text()


def test_ranks_of_torchrun_are_in_the_command(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench/check.py", "--rounds", "4"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = bench.result.Result.begin("", options())
    assert found.command == "torchrun --nproc-per-node 2 bench/check.py --rounds 4"
