"""An audit on several ranks, whole models on none of them: the numbers of one process."""

from __future__ import annotations

import torch
from torch import nn

import zerodrift
from tests.numerics.networks import GPT, WIDTH, Dense, batch
from tests.ranks.harness import run_ranks
from zerodrift.comm.mesh import started
from zerodrift.inspect.audit.entry import audit
from zerodrift.inspect.audit.text import Audit


class Routed(nn.Module):
    """Sends each token to one of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList(Dense(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(1)
        out = torch.stack([expert(x) for expert in self.experts], -2)
        picked = out.gather(-2, chosen[..., None].expand(*chosen.shape, out.shape[-1])).squeeze(-2)
        return (weights * picked).to(x.dtype)


def model() -> nn.Module:
    made = GPT(tied=False, seed=3)
    for layer in made.layers:
        layer.mlp = Routed()
    return made


def audited(rank: int, ranks: int, stage: int) -> Audit:
    batches = [{"tokens": batch(number)} for number in range(4)]
    config = {
        "precision": {"mode": "bf16", "reduce": {"wire": "bf16", "when": "last"}},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    plan = zerodrift.make_plan(config, model(), ranks)
    mine = batches[rank * 4 // ranks : (rank + 1) * 4 // ranks]
    return audit(plan, model, mine, confirm=2, budget=None)


def on_ranks() -> Audit:
    return audited(started()[0], 2, 3)


def test_the_numbers_are_those_of_one_process() -> None:
    alone = audited(0, 1, 0)
    first, second = run_ranks(on_ranks, 2)
    assert first.drift == second.drift == alone.drift
    assert first.drift.choices == 2 * 4 * 2 * 12
    assert [one.choice for one in first.replayed] == [one.choice for one in second.replayed]
    mine = {one.choice: one.square for one in alone.shortlist}
    theirs = {one.choice: one.square for one in first.shortlist}
    assert mine.keys() == theirs.keys()
    for choice, square in mine.items():
        assert abs(theirs[choice] - square) <= 1e-2 * max(mine.values()), choice  # the wire rounds gradients
    # On one rank there is no wire.
    assert not any(line.reduce for line in alone.gradients)
    assert any(1e-4 < line.reduce < 1e-2 for line in first.gradients)
