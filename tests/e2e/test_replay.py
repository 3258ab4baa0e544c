"""A fault planted in a run is found by replaying its steps on another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

from tests import commands
from tests.e2e.jobs import job


def zerodrift(*words: str | Path, plant: str = "") -> tuple[int, str]:
    done = commands.run(*words, PLANT=plant, COLUMNS="100")
    return done.returncode, done.stdout + done.stderr


def test_a_gradient_of_one_rank_is_found(tmp_path: Path) -> None:
    every = {"checkpoint_every": 2, "digest_every": 1, "keep": 9, "export": False, "check_precision": False}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": None}
    precision = {"precision": {"mode": "fp32"}, "zero_optimization": {"stage": 2}}
    model = {"activation_checkpointing": False}
    file = job(tmp_path, "planted", model=model, run=every, config={**config, **precision})
    # Each rank has two micro-batches of a step: its ninth forward is the first of step 5.
    code, text = zerodrift("train", file, "--nproc", "2", plant="1:9")
    assert code == 0, text
    run = tmp_path / "run"
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    kept = [line for line in lines if (line["kind"], line["step"]) != ("digest", 4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    code, text = zerodrift("replay", run, "--nproc", "1")
    assert code == 3, text
    assert "step 3 of 6  the same" in text and "step 4 of 6" not in text
    assert "step 5: different bits on 1 rank, where 2 recorded them" in text
    assert "It may have begun after step 3" in text
    assert "losses     the same" in text
    assert "gradients  other in 1 of 4 units: layers.1" in text
    assert "The backward comes to layers.1 first" in text
    code, text = zerodrift("replay", run, "--to", "4")
    assert code == 0, text
    assert "the same bits in 1 recorded step, on 2 ranks, as they were recorded" in text
    code, text = zerodrift("replay", run, "--nproc", "3")
    assert code == 2 and "`--nproc`: must divide the 4 micro-batches of a step" in text
    code, text = zerodrift("replay", run, "--from", "6", "--to", "6")
    assert code == 2 and "must have a recorded step between them" in text
