"""Jobs for the tests of the trainer: small, and written to a file as a person would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerodrift.train.loop.start import run_here
from zerodrift.train.report.metrics import read

ROOT = Path(__file__).parents[2]

TEXT = "It is the plan that decides, and the engine that does. What happens is compared with both. " * 40


def job(folder: Path, source: str = "plain", steps: int = 6, **blocks: dict[str, Any]) -> Path:
    """The file of a small job that runs into `folder / "run"`. None for a key takes it away."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    written = {
        "model": {"source": f"tests.e2e.small_models:{source}", **blocks.get("model", {})},
        "data": {"train": str(text), "block": 16, **blocks.get("data", {})},
        "run": {"folder": str(folder / "run"), "steps": steps, **blocks.get("run", {})},
        "config": {
            "precision": {"mode": "bf16"},
            "zero_optimization": {"stage": 3},
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
            **blocks.get("config", {}),
        },
        "audit": blocks.get("audit", {}),
    }
    file = folder / "job.json"
    file.write_text(json.dumps(written))
    return file


QUICKLY = ("--set", "model.activation_checkpointing=false")
"""For a job in a process of its own: torch's recomputation imports its compiler, which takes seconds."""


def on_a_rank(path: str, overrides: Sequence[str] = ()) -> None:
    """Run a job on a rank of the harness."""
    os.chdir(ROOT)
    run_here(path, overrides)


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, from the metrics of a run."""
    lines = read(folder / "run" / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def kinds(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read(folder / "run" / "metrics.jsonl") if line["kind"] == kind]


def start(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """The command line, as a process of its own."""
    command = [sys.executable, *launcher, "-m", "zerodrift", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
