"""What a run does between its first step and its last: exports, the best of them, an end before the last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.jobs import kinds, losses, trained
from zerodrift.errors import ZerodriftError
from zerodrift.train.loop.evaluation import BestEvaluation
from zerodrift.train.tools.sample import TextGenerator

pytestmark = pytest.mark.usefixtures("at_the_root")


def test_a_better_loss_is_one_below_all_before_it() -> None:
    best = BestEvaluation(2)
    better = [best.add(loss) for loss in (3.0, 3.0, 2.0, float("nan"), 1.0)]
    assert better == [True, False, True, False, True] and not best.reason
    assert not best.add(1.0) and not best.reason
    assert not best.add(1.5) and best.reason
    assert best.reason == "2 evaluations without a better loss than 1.0000 (`run.patience`)"
    assert BestEvaluation(2, [1.0, 1.0, None]).reason
    assert not BestEvaluation(0, [1.0, 1.0, 1.0]).reason


def patient(folder: Path, **run: Any) -> None:
    """Train a job whose validation loss gets worse after its second evaluation: it diverges."""
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
    models = []
    for steps in (1, 4):
        folder = tmp_path / str(steps)
        trained(folder, steps=steps, run={"export_every": 1}, overrides=["model.freeze=['embed.*']"])
        models.append(load_file(folder / "run" / "export" / "model.safetensors"))
    moved = {name for name in models[0] if not models[0][name].equal(models[1][name])}
    assert moved == {name for name in models[0] if not name.startswith("embed.")}
    exports = [path.name for path in sorted((tmp_path / "4" / "run" / "exports").iterdir())]
    assert exports == ["step-00000001", "step-00000002", "step-00000003"]  # the last is `export`


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.freeze=['token.*']"], "must match parameters of the model; got 'token.*'"),
        (["model.freeze=['*']"], "must leave parameters to train"),
        (["model.freeze=['*']", "model.lora={}"], "must be empty with `model.lora`"),
        (["run.patience=2", "run.evaluate_every=1"], "must go with data to validate on"),
        (["run.patience=2", "data.validation=0.2"], "must go with evaluations on the way"),
        (["run.export_best=true"], "must go with data to validate on"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ZerodriftError, match=re.escape(words)):
        trained(tmp_path, overrides=overrides)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
