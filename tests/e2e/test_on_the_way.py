"""Exports and traces in the middle of a run, and an early stop."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.jobs import job, kinds, losses, on_a_rank, trained
from tests.ranks.harness import run_ranks
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.tools.sample import TextGenerator


def patient(folder: Path, **run: Any) -> None:
    """Train a job whose validation loss diverges after its second evaluation."""
    given = {"evaluate_every": 1, "export_best": True, "patience": 2, **run}
    rising = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 3.0}}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 3.0}}, "scheduler": rising}
    trained(folder, steps=20, run=given, data={"validation": 0.2}, config=config)


def test_a_run_that_gets_no_better_ends_with_its_best_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patient(tmp_path, export_every=2)
    found = [line["validation_loss"] for line in kinds(tmp_path, "evaluation")]
    numbers = [float("inf") if loss is None else loss for loss in found]
    best = min(range(len(numbers)), key=numbers.__getitem__)
    assert len(numbers) == best + 3 < 20 and len(losses(tmp_path)) == len(numbers)
    out = capsys.readouterr().out
    assert f"ended after step {len(numbers)} of 20: 2 evaluations without a better loss" in out
    folder = tmp_path / "run"
    assert f"done after step {len(numbers)} of 20: 2 evaluations" in (folder / "report.html").read_text()
    exported = sorted(path.name for path in (folder / "exports").iterdir())
    assert exported == [f"step-{step:08}" for step in range(2, len(numbers), 2)]
    # The best is the model of its step, and not the last one.
    kept = load_file(folder / "best" / "model.safetensors")
    last = load_file(folder / "export" / "model.safetensors")
    assert any(not kept[name].equal(last[name]) for name in kept)
    assert TextGenerator(folder / "best") is not None
    # Started again it has nothing to do, and with more patience it goes on.
    patient(tmp_path, export_every=2)
    again = capsys.readouterr().out
    assert "nothing to train: 2 evaluations without a better loss" in again and "ended after" not in again
    assert len(losses(tmp_path)) == len(numbers)
    patient(tmp_path, patience=3)
    assert len(losses(tmp_path)) == len(numbers) + 1


def test_what_is_frozen_stays_as_it_was(tmp_path: Path) -> None:
    trained(tmp_path, steps=4, run={"export_every": 1}, overrides=["model.freeze=['embed.*']"])
    exports = sorted((tmp_path / "run" / "exports").iterdir())
    assert [path.name for path in exports] == [f"step-{step:08d}" for step in (1, 2, 3)], (
        "the last is `export`"
    )
    folders = (exports[0], tmp_path / "run" / "export")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved == {name for name in before if not name.startswith("embed.")}


# --- traces -----------------------------------------------------------------------------------------------


def traced(folder: Path) -> dict[str, list[str]]:
    """Return the steps in each trace file, by their names."""
    found = {}
    for file in sorted((folder / "run" / "traces").iterdir()):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        found[file.name] = sorted({e["name"] for e in events if e.get("name", "").startswith("step ")})
    return found


def test_each_rank_has_a_trace_and_the_bits_are_the_same(tmp_path: Path) -> None:
    found = []
    for number, more in enumerate(([], ["run.profile={from: 2, steps: 2}"])):
        folder = tmp_path / str(number)
        config = {"scheduler": {"type": "linear", "params": {"num_training_steps": "auto"}}}
        run_ranks(on_a_rank, 2, str(job(folder, steps=4, config=config)), more)
        found.append([(line["loss"], line["lr"]) for line in kinds(folder, "step")])
    assert found[0] == found[1] and len({loss for loss, _ in found[0]}) == 4
    assert [rate for _, rate in found[0]] == [1e-2 * left for left in (1.0, 0.75, 0.5, 0.25)]
    names = [f"steps-00000002-00000003-rank-{rank}.json.gz" for rank in range(2)]
    assert traced(folder) == {name: ["step 2", "step 3"] for name in names}
    page = (folder / "run" / "report.html").read_text()
    assert "steps 2 to 3" in page and str(folder / "run" / "traces") in page
    assert RunFolder(folder / "run").load_job().run.profile is not None
