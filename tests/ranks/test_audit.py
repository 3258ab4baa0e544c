"""An audit on several ranks has the numbers of one process, without a whole model on any rank."""

from __future__ import annotations

import torch
from torch import nn

import zerodrift
from tests.numerics.networks import GPT, WIDTH, Dense, batch
from tests.ranks.harness import run_ranks
from zerodrift.comm.mesh import started
from zerodrift.inspect.audit.entry import audit
from zerodrift.inspect.audit.report import Audit


class Routed(nn.Module):
    """A module that sends each token to one of two parts."""

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


def narrowed(rank: int, ranks: int, stage: int, rules: list[dict[str, str]], goal: str | None) -> Audit:
    batches = [{"tokens": batch(number)} for number in range(2)]
    config = {
        "precision": {"mode": "bf16", "rules": rules},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    plan = zerodrift.make_plan(config, model(), ranks)
    mine = batches[rank * 2 // ranks : (rank + 1) * 2 // ranks]
    return audit(plan, model, mine, confirm=0, budget=None, narrow=goal)


def narrowed_on_ranks() -> Audit:
    return narrowed(started()[0], 2, 3, [], "bytes:2x")


def test_ranks_choose_the_same_formats_and_one_process_drifts_as_far_with_them() -> None:
    first, second = run_ranks(narrowed_on_ranks, 2, timeout=300)
    advice = first.formats
    assert advice is not None and advice == second.formats
    assert {trial.column for trial in advice.trials} == {"gather"}
    assert {trial.pattern: trial.left_out for trial in advice.trials if trial.left_out} == {
        "layers.*.mlp.router.weight": "because it saves no bytes on the wire"  # smaller than its padding
    }
    assert len(advice.taken) > 3 and all(advice.trials[number].alone for number in advice.taken)
    assert advice.chosen.bytes.wire < 0.9 * advice.start.bytes.wire
    assert advice.start.drift.rms < advice.chosen.drift.rms <= advice.limit
    alone = narrowed(0, 1, 2, [dict(rule) for rule in advice.rules], None)
    assert alone.drift == advice.chosen.drift and alone.formats is None
