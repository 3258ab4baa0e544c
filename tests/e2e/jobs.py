"""Small jobs for the tests of the trainer, written to a file as a user would."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.unit.data_files import jsonl
from zerodrift.train.loop.launcher import LaunchRequest
from zerodrift.train.loop.start import run_here, train
from zerodrift.train.report.metrics import read

ROOT = Path(__file__).parents[2]

Rows = Sequence[dict[str, Any]]

TEXT = "It is the plan that decides, and the engine that does. What happens is compared with both. " * 40


def job(
    folder: Path, source: str = "plain", steps: int = 6, rows: Rows | None = None, **blocks: dict[str, Any]
) -> Path:
    """Write a job that runs into `folder / "run"`; return its path. None for a key removes it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    if rows is not None:
        text = jsonl(folder / "rows.jsonl", rows)
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


def trained(
    folder: Path, source: str = "plain", steps: int = 6, *, overrides: Sequence[str] = (), **blocks: Any
) -> int:
    """Train a job in this process and return the exit code."""
    return train(str(job(folder, source, steps, **blocks)), overrides)


QUICKLY = ("--set", "model.activation_checkpointing=false")
"""Options that avoid torch's recomputation in a new process, where it imports the compiler for seconds."""


def on_a_rank(path: str, overrides: Sequence[str] = ()) -> None:
    """Run a job on a rank of the harness."""
    os.chdir(ROOT)
    run_here(LaunchRequest(path, overrides))


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step, from the metrics of a run; each step has a time of its own."""
    lines = kinds(folder, "step")
    assert len({line["seconds"] for line in lines}) == len(lines)
    return {line["step"]: line["loss"] for line in lines}


def exported(folder: Path) -> bytes:
    """Return the exported weights of a run."""
    return (folder / "run" / "export" / "model.safetensors").read_bytes()


def kinds(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of a kind, from the metrics of a run."""
    return [line for line in read(folder / "run" / "metrics.jsonl") if line["kind"] == kind]
