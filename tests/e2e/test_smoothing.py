"""Label smoothing over whole steps of a run, beside the `LabelSmoother` of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.jobs import job, kinds, losses, on_a_rank
from tests.e2e.small_models import llama
from tests.ranks.harness import run_ranks

transformers = pytest.importorskip("transformers")
SHARE, STEPS, LR = 0.15, 3, 0.5


def theirs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(SHARE)({"logits": logits}, labels, shift_labels=True)


TALKS = [{"prompt": "abc" * (number % 9), "completion": "ij" * (1 + number % 4)} for number in range(1, 25)]


def masked(folder: Path, packed: bool, ranks: int, **config: Any) -> str:
    """Write a job whose micro-batches differ much in learned tokens, and return its path."""
    data = {"format": "chat", "block": 64, "pack": packed, "label_smoothing": SHARE, "validation": 0.25}
    config = {
        "precision": {"mode": "fp32"},
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // ranks,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "scheduler": None,
        **config,
    }
    run, again = {"evaluate_every": 1}, {"activation_checkpointing": False}
    return str(job(folder, "llama", STEPS, TALKS, data=data, run=run, config=config, model=again))


def plain(folder: Path) -> tuple[list[float], float]:
    """Train a plain loop with one loss per step; return its losses, and the final one of validation."""
    from zerodrift.train.data.blocks import open_blocks
    from zerodrift.train.data.sampling import BlockSampler

    (cache,) = (path.parent for path in (folder / "cache").glob("*/train.tokens"))
    blocks, found = open_blocks(cache, "train"), []
    torch.manual_seed(0)
    model = llama()
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        read = blocks.read(BlockSampler(len(blocks), 0).step(step, 8))
        loss = theirs(model(torch.from_numpy(read.tokens)).logits, torch.from_numpy(read.labels))
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        found.append(loss.item())
    held = open_blocks(cache, "validation")
    every = held.read(np.arange(len(held)))
    with torch.no_grad():
        given = {"input_ids": torch.from_numpy(every.tokens), "labels": torch.from_numpy(every.labels)}
        return found, model(**given).loss.item()


PIPELINE = {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("ranks", "packed", "config"), [(1, False, {}), (2, True, {}), (2, False, PIPELINE)], ids=str
)
def test_a_step_has_the_mean_over_all_its_learned_tokens(
    tmp_path: Path, ranks: int, packed: bool, config: dict[str, Any]
) -> None:
    path = masked(tmp_path, packed, ranks=ranks, **config)
    run_ranks(on_a_rank, ranks, path)
    expected, last = plain(tmp_path)
    assert list(losses(tmp_path).values()) == pytest.approx(expected, rel=2e-6)
    # Evaluations are of the labels as they are.
    assert kinds(tmp_path, "evaluation")[-1]["validation_loss"] == pytest.approx(last, rel=2e-6)
