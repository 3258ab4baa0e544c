"""Jobs with a pipeline: the same numbers as without one, checkpoints, evaluation and exports."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import commands
from tests.e2e.jobs import ROOT, TEXT, exported, job, kinds, losses, trained
from tests.ranks.harness import run_ranks
from zerodrift.errors import ZerodriftError
from zerodrift.train.loop.launcher import LaunchRequest
from zerodrift.train.loop.start import run_here, train

PARTS = "tests.e2e.small_models:parts"
WHOLE = {
    "precision": {"mode": "fp32"},
    "zero_optimization": {"stage": 2},
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
}
"""Config of one process with as many micro-batches."""


def staged(
    folder: Path,
    model: str = "plain",
    steps: int = 6,
    ranks: int = 2,
    schedule: str = "1f1b",
    **blocks: Any,
) -> Path:
    """Write a job with two stages, whose steps have the same blocks on any number of ranks."""
    config = {
        **WHOLE,
        "gradient_accumulation_steps": None,
        "train_micro_batch_size_per_gpu": 16 // (4 * (ranks // 2)),
        "pipeline": {"stages": 2, "schedule": schedule, "micro_batches": 4},
        **blocks.pop("config", {}),
    }
    run = {"export": False, **blocks.pop("run", {})}
    return job(folder, model, steps, config=config, run=run, model={"parts": PARTS}, **blocks)


def run(file: str, overrides: Sequence[str] = ()) -> str:
    """Train on a rank of the harness; return the text of one of our errors."""
    os.chdir(ROOT)
    try:
        run_here(LaunchRequest(file, overrides))
    except ZerodriftError as error:
        return str(error)
    return ""


CHAT = [{"prompt": "what decides?", "completion": "the plan" * (1 + number % 5)} for number in range(64)]


def test_the_losses_are_those_without_a_pipeline(tmp_path: Path) -> None:
    data = {"format": "chat", "block": 48, "validation": 0.2}
    trained(tmp_path / "whole", "plain", 5, rows=CHAT, config=WHOLE, data=data, run={"export": False})
    expected = losses(tmp_path / "whole")
    file = staged(tmp_path, steps=5, rows=CHAT, data=data, run={"evaluate_every": 2})
    assert run_ranks(run, 2, str(file)) == ["", ""]
    assert losses(tmp_path) == expected, "bit for bit, weights of uneven micro-batches among them"
    seen, known = kinds(tmp_path, "evaluation"), kinds(tmp_path / "whole", "evaluation")
    assert [line["step"] for line in seen] == [2, 4, 5]
    assert seen[-1]["labels"] == known[-1]["labels"] > 0
    assert seen[-1]["validation_loss"] == known[-1]["validation_loss"]


def test_four_ranks_and_every_page_of_it(tmp_path: Path) -> None:
    rules = {"rules": [{"match": "head.*", "pin": "fp32"}]}
    config = {"precision": {"mode": "bf16", **rules}, "zero_optimization": {"stage": 3}}
    file = staged(tmp_path, "deep", 2, ranks=4, schedule="zbv", config=config, run={"export": True})
    assert run_ranks(run, 4, str(file)) == [""] * 4
    cells = kinds(tmp_path, "precision")[0]["cells"]
    assert {cell[-1] for cell in cells} <= {"as declared", "not seen"}
    assert {cell[0] for cell in cells if cell[-1] == "not seen"} == {"grad"}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "done, 2 steps" in page and "of the ranks' time" in page.replace("&#x27;", "'"), "with its bubble"
    assert exported(tmp_path)


def test_going_on_is_the_same_as_not_stopping_and_works_without_the_pipeline(tmp_path: Path) -> None:
    """Random numbers that torch draws to learn the shapes of a pipeline are put back, for dropout."""
    found = []
    for name, turns in (("a", [4]), ("b", [2, 4])):
        folder = tmp_path / name
        for steps in turns:
            file = staged(folder, "dropping", steps, run={"checkpoint_every": 2})
            assert run_ranks(run, 2, str(file)) == ["", ""]
        found.append(losses(folder))
    assert list(found[0]) == [1, 2, 3, 4] and found[0] == found[1]
    alone = ["config.pipeline=null", "config.gradient_accumulation_steps=4", "run.steps=5"]
    assert train(str(file), alone) == 0
    assert list(losses(folder)) == [1, 2, 3, 4, 5]


def test_by_the_tree_a_run_is_replayed_without_its_pipeline(tmp_path: Path) -> None:
    """One process replays a run with dropout: gradients and state by unit, and every loss."""
    tree = {"precision": {"mode": "bf16", "reduce": {"order": "tree"}}}
    file = staged(tmp_path, "dropping", 2, config=tree, run={"digest_every": 1})
    assert run_ranks(run, 2, str(file)) == [""] * 2
    assert len(kinds(tmp_path, "digest")) == 2
    done = commands.run("replay", tmp_path / "run", "--from", "0", "--nproc", "1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_bad_batch_is_named_saved_once_and_skipped(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT[:200] + chr(7) + TEXT[201:1280])
    assert run_ranks(run, 2, str(staged(tmp_path, "bad_gradient", steps=5))) == ["", ""], "one epoch"
    (skip,) = kinds(tmp_path, "skip")
    assert skip["parameters"][0] == "layers.1.up.weight"
    (saved,) = (tmp_path / "run" / "bad").iterdir()
    assert (torch.load(saved, weights_only=True)["tokens"] == 7).any(), "that micro-batch and no other"
    assert all(map(math.isfinite, losses(tmp_path).values()))


def test_one_stage_that_is_asked_to_stop_stops_all(tmp_path: Path) -> None:
    run_ranks(run, 2, str(staged(tmp_path, "stopped", steps=200)))
    (end,) = kinds(tmp_path, "end")
    assert end["stopped"] and 0 < end["step"] < 200
    assert (tmp_path / "run" / "checkpoints" / f"step-{end['step']:08d}").is_dir()


WRONG = {
    "model.parts=": "`model`: must be a causal language model of transformers of type",
    "model.lora={rank: 2}": "`model.lora`: must be absent with `config.pipeline`",
    "model.compile=true": "`model.compile`: must be false under zbv, which splits backwards",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_is_wrong_is_told(override: str, tmp_path: Path) -> None:
    more = ["config.pipeline.schedule=zbv"] if "compile" in override else []
    for said in run_ranks(run, 2, str(staged(tmp_path, steps=1)), [override, *more]):
        assert WRONG[override] in said
