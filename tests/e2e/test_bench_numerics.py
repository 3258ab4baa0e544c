"""`convergence.py`, `persistent.py` and `same_bits.py` of `bench`, small: they run, and say what is so."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.harness import forks

ROOT = Path(__file__).parents[2]


def forked(function: Any, *arguments: Any) -> dict[str, Any]:
    """What two ranks of the harness say in place of two processes that a bench starts."""
    context = forks()
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=function, args=(rank, folder, *arguments, queue), daemon=True)
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(timeout=100)
            rank.kill()
        assert [rank.exitcode for rank in ranks] == [0, 0]
        return queue.get()


def test_convergence_measures_every_scheme_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "bench")
    convergence = importlib.import_module("convergence")
    schemes = ["mode fp32", "split/fp32", "split/8bit"]
    record, plot = tmp_path / "record.json", tmp_path / "plot.svg"
    small = ("--steps", "100", "--seeds", "1", "--width", "16", "--layers", "1", "--length", "16")
    words = [*small, "--only", ",".join(schemes), "--json", str(record), "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", ["convergence.py", *words])
    convergence.main()
    lines = capsys.readouterr().out.splitlines()
    results = {found["scheme"]: found for found in json.loads(record.read_text())["results"]}
    assert list(results) == schemes
    assert all(len(found["losses"]) == 100 and len(found["moments"]) == 4 for found in results.values())
    exact, split = results["mode fp32"]["losses"], results["split/fp32"]["losses"]
    assert exact[-1] < exact[0] - 0.5 and split != exact
    assert split == pytest.approx(exact, abs=0.05)
    head = next(number for number, line in enumerate(lines) if line.startswith("master "))
    shown = [line.split()[0] for line in lines[head + 1 :] if not line.startswith("drawn")]
    assert shown == ["mode", "split", "split"]
    assert plot.read_text().startswith("<?xml")


@pytest.mark.slow
def test_bytes_that_stay_are_the_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks begin with everything imported; as it starts them itself, they import it one by one."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    persistent = importlib.import_module("persistent")
    monkeypatch.setattr(persistent.peers, "launch", forked)
    small = ("--width", "128", "--layers", "2", "--vocabulary", "1024", "--steps", "2")
    names = ["zd-3", "zd-3 8bit", "fsdp2 with gradients"]
    monkeypatch.setattr(sys, "argv", ["persistent.py", *small, "--only", ",".join(names)])
    persistent.main()
    lines = capsys.readouterr().out.splitlines()
    found = {}
    for line, name in zip(lines[-len(names) :], names, strict=True):
        assert line.startswith(name + " ")
        found[name] = line[len(name) :].split()
    for name in names[:2]:
        planned, tensors, _ = (float(text) for text in found[name])
        # The table of groups and keys, and the counters, are a few bytes per block of 256.
        assert tensors == pytest.approx(planned, abs=0.1)
    assert [float(found[name][0]) for name in names[:2]] == pytest.approx([12, 6.03], rel=0.02)
    assert float(found["fsdp2 with gradients"][1]) == pytest.approx(16, rel=0.02)


@pytest.mark.slow
def test_a_run_through_a_kill_is_said_to_be_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    same_bits = importlib.import_module("same_bits")
    monkeypatch.setattr(same_bits, "processes", forks)
    small = ("--steps", "12", "--kills", "1", "--ranks", "1", "--only", "moe fp16")
    monkeypatch.setattr(sys, "argv", ["same_bits.py", *small])
    with pytest.raises(SystemExit) as ended:
        same_bits.main()
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0, "\n".join(lines)
    table = [line.split() for line in lines if line.startswith("moe, fp16")]
    assert [cells[-1] for cells in table] == ["same"] * 2
    assert len({cells[-2] for cells in table}) == 1 and [cells[-3] for cells in table] == ["0", "1"]


@pytest.mark.parametrize("other", [{"values": {"weight a": "1"}}, {"digest": "1"}, {"skipped": 2}])
def test_what_is_apart_is_named(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    same_bits = importlib.import_module("same_bits")
    alike = {"values": {"weight a": "0"}, "digest": "0", "skipped": 1}
    first, second = (same_bits.Found(same_bits.RUNS[0], "", 1, **what) for what in (alike, alike | other))
    assert first.apart(first) == ""
    assert str(*other).removeprefix("values") in second.apart(first) and "other" in second.apart(first)
