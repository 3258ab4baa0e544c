"""A check of a run's rounding while it trains finds planted errors, and does not change the run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zerodrift
from zerodrift.engine.engine import Engine
from zerodrift.errors import UnsupportedError
from zerodrift.inspect.audit.estimates import PrecisionProbe, probe, require_probe

CONFIG = {
    "precision": {"mode": "bf16"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "gradient_accumulation_steps": 2,
}


class Noisy(nn.Module):
    """A module that draws random numbers, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 17)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = nn.functional.dropout(self.norm(self.table(ids)), 0.25)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [{"ids": torch.randint(0, 17, (2, 8), generator=generator)} for _ in range(2)]


def train_and_probe(looks: bool) -> tuple[Engine, list[PrecisionProbe]]:
    torch.manual_seed(0)
    engine = zerodrift.initialize(Noisy(), config=CONFIG, quiet=True)
    torch.manual_seed(1)
    seen = []
    for step in range(3):
        engine.train_batch(batches(step))
        if looks:
            seen.append(probe(engine, batches(step)))
    return engine, seen


def test_a_run_that_is_looked_at_keeps_its_bits() -> None:
    plain, _ = train_and_probe(looks=False)
    digest, calls, drawn = str(plain.digest()), float(plain.module.calls), torch.rand(3)
    plain.destroy()
    looked, seen = train_and_probe(looks=True)
    assert (str(looked.digest()), float(looked.module.calls)) == (digest, calls)
    assert torch.equal(torch.rand(3), drawn)
    assert looked.micro_batches == 0
    looked.destroy()
    names = {name for name, _, _ in seen[0].cells}
    assert {"head.weight", "table.weight"} <= names
    assert all(0 < each.rms < 1 for each in seen)


def test_what_cannot_be_looked_at_is_refused_before_it_begins() -> None:
    tree = {**CONFIG, "precision": {"mode": "bf16", "reduce": {"order": "tree"}}}
    plan = zerodrift.make_plan(tree, Noisy())
    with pytest.raises(UnsupportedError, match=r"audit\.at.*order: tree"):
        require_probe(plan)
    require_probe(zerodrift.make_plan(CONFIG, Noisy()))
