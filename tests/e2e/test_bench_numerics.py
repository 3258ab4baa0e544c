"""Small runs of `convergence.py` and `same_bits.py` of `bench`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_convergence_measures_every_scheme_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "bench")
    convergence = importlib.import_module("convergence")
    schemes = ["mode fp32", "split/fp32", "split/8bit"]
    record, plot = tmp_path / "record.json", tmp_path / "plot.svg"
    small = ("--steps", "50", "--seeds", "1", "--width", "16", "--layers", "1", "--length", "16")
    words = [*small, "--only", ",".join(schemes), "--json", str(record), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["convergence.py", *words])
    convergence.main()
    results = {found["scheme"]: found for found in json.loads(record.read_text())["results"]}
    assert list(results) == schemes and all(len(found["moments"]) == 2 for found in results.values())
    exact, split = results["mode fp32"]["losses"], results["split/fp32"]["losses"]
    assert len(exact) == 50 and exact[-1] < exact[0] - 0.5 and split != exact
    assert split == pytest.approx(exact, abs=0.05)
    table = capsys.readouterr().out.partition("\nmaster ")[2].splitlines()[1:]
    assert [line.split()[0] for line in table[:3]] == ["mode", "split", "split"]
    assert plot.read_text().startswith("<?xml")


@pytest.mark.parametrize("other", [{"values": {"weight a": "1"}}, {"digest": "1"}, {"skipped": 2}])
def test_what_is_apart_is_named(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    same_bits = importlib.import_module("same_bits")
    alike = {"values": {"weight a": "0"}, "digest": "0", "skipped": 1}
    first, second = (same_bits.Outcome(same_bits.RUNS[0], "", 1, **what) for what in (alike, alike | other))
    assert first.difference(first) == ""
    text = second.difference(first)
    assert str(*other).removeprefix("values") in text and "other" in text
