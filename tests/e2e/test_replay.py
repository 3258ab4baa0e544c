"""A fault planted in a run is found by replaying its steps on another number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests import commands

MODEL = """
import os
import torch
from torch import nn
from torch.nn import functional as F

class Faulty(torch.autograd.Function):
    '''x @ weight.T. Its weight gradient may have one other bit.'''

    @staticmethod
    def forward(ctx, x, weight, fault):
        ctx.save_for_backward(x, weight)
        ctx.fault = fault
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_weight = grad.flatten(0, -2).T @ x.flatten(0, -2)
        if ctx.fault:
            of_weight.view(torch.int32)[0, 0] ^= 1 << 10
        return grad @ weight, of_weight, None

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(257, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(3))
        self.head = nn.Linear(16, 257)
        self.calls = 0

    def forward(self, input_ids, labels=None):
        self.calls += torch.is_grad_enabled() and self.training
        here = os.environ.get('PLANT') == f"{os.environ.get('RANK', '0')}:{self.calls}"
        x = self.embed(input_ids)
        for number, layer in enumerate(self.layers):
            product = Faulty.apply(F.dropout(x, 0.1, self.training), layer[0].weight, here and number == 1)
            x = x + F.gelu(product + layer[0].bias)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

def model():
    return Model()
"""

STEPS = 6


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planted.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("\n\n".join(f"line {number} of it" for number in range(400)))
    run = {"folder": "run", "steps": STEPS, "checkpoint_every": 2, "digest_every": 1, "keep": 9}
    job = {
        "model": {"source": "planted:model", "activation_checkpointing": False},
        "data": {"train": "text.txt", "block": 16},
        "run": {**run, "export": False, "check_precision": False},
        "config": {
            "zero_optimization": {"stage": 2},
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def zerodrift(*words: str, plant: str = "") -> tuple[int, str]:
    """Run a command in the folder of the job."""
    done = commands.run(*words, PLANT=plant, COLUMNS="100")
    return done.returncode, done.stdout + done.stderr


def test_a_bit_of_a_gradient_of_one_rank_is_found(folder: Path) -> None:
    # Each rank has two micro-batches of a step: its ninth forward is the first of step 5.
    code, text = zerodrift("train", "job.yaml", "--nproc", "2", plant="1:9")
    assert code == 0, text
    metrics = folder / "run" / "metrics.jsonl"
    lines = map(json.loads, metrics.read_text().splitlines())
    kept = [line for line in lines if (line["kind"], line["step"]) != ("digest", 4)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
    code, text = zerodrift("replay", "run", "--nproc", "1")
    assert code == 3, text
    assert "step 3 of 6  the same" in text and "step 4 of 6" not in text
    assert "step 5: other bits on 1 rank, where 2 recorded them" in text
    assert "It may have begun after step 3" in text
    assert "losses     the same" in text
    assert "gradients  other in 1 of 4 units: layers.1" in text
    assert "The backward comes to layers.1 first" in text
    code, text = zerodrift("replay", "run", "--to", "4")
    assert code == 0, text
    assert "the same bits in 1 recorded step, on 2 ranks, as they were recorded" in text
    code, text = zerodrift("replay", "run", "--nproc", "3")
    assert code == 2 and "`--nproc`: must divide the 4 micro-batches of a step" in text
    code, text = zerodrift("replay", "run", "--from", "6", "--to", "6")
    assert code == 2 and "must have a recorded step between them" in text
