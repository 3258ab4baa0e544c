"""A changed job resumes with the values that it prints."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import kinds, losses, trained
from zerodrift.checkpoint.files import Lock
from zerodrift.errors import CheckpointError, ZerodriftError
from zerodrift.train.loop.run_folder import RunFolder


def rates(folder: Path) -> dict[int, float]:
    return {line["step"]: line["lr"] for line in kinds(folder, "step")}


def told(capsys: pytest.CaptureFixture[str], folder: Path, **blocks: Any) -> str:
    """Train a job and return its output."""
    capsys.readouterr()
    assert trained(folder, **blocks) == 0
    return capsys.readouterr().out


def adam(lr: float, decay: float = 0.0) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": lr, "weight_decay": decay}}


LENGTHS = {"total_num_steps": "auto", "warmup_num_steps": 2, "cos_min_ratio": 0.1}
COSINE = {"type": "WarmupCosineLR", "params": LENGTHS}


def cosine(lr: float, update: int, total: int) -> float:
    """Return the rate of an update by its formula."""
    share = (update - 1 - 2 + 1) / (total - 2)
    return lr * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)


def test_rates_of_a_changed_job_hold_from_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job has no schedule, then one that the checkpoint lacks."""
    without = {"optimizer": adam(1e-2, 0.1), "scheduler": None}
    trained(tmp_path, steps=2, config=without)
    out = told(capsys, tmp_path, steps=4, config={**without, "optimizer": adam(2e-3, 0.3)})
    assert rates(tmp_path) == {1: 1e-2, 2: 1e-2, 3: 2e-3, 4: 2e-3}
    assert "going on after step 2 of 4, from " in out
    assert "config.optimizer.params.lr: was 0.01, is 0.002; the job's holds from step 3 on" in out
    assert "config.optimizer.params.weight_decay: was 0.1, is 0.3; the job's holds from step 3 on" in out
    assert "run.steps: was 2, is 4;" in out
    (_, start) = kinds(tmp_path, "start")
    assert ["run.steps", "2", "4"] in [change[:3] for change in start["changed"]]

    out = told(capsys, tmp_path, steps=6, config={"optimizer": adam(1e-2), "scheduler": COSINE})
    assert "config.scheduler.type: was not given, is WarmupCosineLR; the job's holds from step 5 on" in out
    found = rates(tmp_path)
    for step in (5, 6):
        assert found[step] == pytest.approx(cosine(1e-2, step - 1, 6)), step


def test_a_run_that_is_over_keeps_what_it_says_of_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Started again as it was, with another job, and then with what its page does not have yet."""
    trained(tmp_path, steps=2)
    folder, other = tmp_path / "run", {"config": {"optimizer": adam(3e-3)}}
    files = [folder / name for name in ("job.json", "plan.json", "environment.json", "report.html")]
    before, metrics = [file.read_bytes() for file in files], (folder / "metrics.jsonl").read_bytes()
    for blocks in ({}, other):
        out = told(capsys, tmp_path, steps=2, **blocks)
        assert "nothing to train: the run has had 2 of 2 steps" in out and "raise `run.steps`" in out
        assert "changed since" not in out and "step 2/2" not in out
        assert [file.read_bytes() for file in files] == before
        assert (folder / "metrics.jsonl").read_bytes() == metrics
    told(capsys, tmp_path, steps=2, run={"samples": ["It is"]}, **other)
    assert [file.read_bytes() for file in files][:3] == before[:3]
    page = files[3].read_text()
    assert "<b>It is</b>" in page and kinds(tmp_path, "sample")


def test_a_path_is_where_a_run_begins_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint, its folder and its run are all paths to the same checkpoint."""
    trained(tmp_path, steps=2)
    first = tmp_path / "run"
    for number, path in enumerate((first, first / "checkpoints", first / "checkpoints" / "step-00000002")):
        place = {"folder": str(tmp_path / f"other-{number}"), "resume": str(path)}
        assert "going on after step 2 of 3, from " in told(capsys, tmp_path, steps=3, run=place)
    out = told(capsys, tmp_path, steps=4, run=place)
    assert "going on after step 3 of 4, from " in out and "and not from" in out
    tag = {"resume": "step-00000002"}
    assert trained(tmp_path, steps=3, run=tag) == 0
    for wanted in ("step-2", str(tmp_path / "none" / "step-2")):
        with pytest.raises(ZerodriftError, match="step-2"):
            trained(tmp_path, steps=3, run={"resume": wanted})


def test_another_order_of_sums_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, steps=1)
    changed = {"zero_optimization": {"stage": 0}, "precision": {"mode": "bf16", "reduce": {"order": "rank"}}}
    out = told(capsys, tmp_path, steps=2, run={"resume": "latest"}, config=changed)
    assert out.count("config.zero_optimization.stage: was 3, is 0") == 1
    assert (
        "order of sums: was tree over micro-batches, is by rank; losses will differ in their last bits; "
        "`config.precision.reduce.order: tree` keeps them" in " ".join(out.split())
    )


def test_a_run_goes_on_in_the_order_of_sums_in_which_it_was_begun(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a" * 6400)
    for steps, named in ((1, {"order": "rank"}), (2, {})):
        config = {"precision": {"mode": "fp32", "reduce": named}, "optimizer": adam(0.0), "scheduler": None}
        trained(tmp_path, "dropping", steps, config=config)
        assert not RunFolder(tmp_path / "run").load_plan().policy.tree
    assert len({*losses(tmp_path).values()}) == 2, "dropout of each step is another"


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    other = Lock.take(folder)
    with pytest.raises(CheckpointError, match=r"must have one writer; got process \d+ on "):
        trained(tmp_path, steps=1)
    assert not (folder / "metrics.jsonl").exists()
    other.release()
    assert trained(tmp_path, steps=1) == 0
    assert not list(folder.glob(".lock*"))


def test_what_cannot_be_gone_on_with_is_told_in_the_jobs_keys(tmp_path: Path) -> None:
    trained(tmp_path, steps=1)
    with pytest.raises(CheckpointError, match=r"must go on with the data.*got `data.block` 8, which was 16"):
        trained(tmp_path, steps=2, data={"block": 8})
    with pytest.raises(CheckpointError, match="must be `auto` for a folder with checkpoints; got never"):
        trained(tmp_path, steps=2, data={"block": 8}, run={"resume": "never"})
    with pytest.raises(CheckpointError) as caught:
        trained(tmp_path, steps=2, config={"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}})
    assert "Set `config.optimizer.type` as it was." in str(caught.value)
    assert not re.search(r"allow\s*=", str(caught.value))
    with pytest.raises(CheckpointError, match=r"run\.resume.*got no name"):
        trained(tmp_path, steps=2, run={"resume": ""})
    elsewhere = {"resume": "never", "folder": str(tmp_path / "other")}
    assert trained(tmp_path, steps=2, data={"block": 8}, run=elsewhere) == 0
