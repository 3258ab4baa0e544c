"""An audit on several ranks has the numbers of one process, without a whole model on any rank."""

from __future__ import annotations

from typing import Any

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


def audited(
    rank: int, ranks: int, stage: int, precision: dict[str, Any], count: int = 2, **more: Any
) -> Audit:
    batches = [{"tokens": batch(number)} for number in range(count)]
    config = {
        "precision": {"mode": "bf16", **precision},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    mine = batches[rank * count // ranks : (rank + 1) * count // ranks]
    return audit(zerodrift.make_plan(config, model(), ranks), model, mine, budget=None, **more)


def on_ranks(precision: dict[str, Any], more: dict[str, Any]) -> Audit:
    return audited(started()[0], 2, 3, precision, **more)


def test_the_numbers_are_those_of_one_process() -> None:
    wire = {"reduce": {"wire": "bf16", "when": "last"}}
    more = {"count": 4, "confirm": 1}
    alone = audited(0, 1, 0, wire, **more)
    first, second = run_ranks(on_ranks, 2, wire, more)
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


def test_ranks_choose_the_same_formats_and_one_process_drifts_as_far_with_them() -> None:
    first, second = run_ranks(on_ranks, 2, {}, {"confirm": 0, "narrow": "bytes:2x"}, timeout=300)
    advice = first.formats
    assert advice is not None and advice == second.formats
    assert {trial.column for trial in advice.trials} == {"gather"}
    assert {trial.pattern: trial.left_out for trial in advice.trials if trial.left_out} == {
        "layers.*.mlp.router.weight": "because it saves no bytes on the wire"  # smaller than its padding
    }
    assert len(advice.taken) > 3 and all(advice.trials[number].alone for number in advice.taken)
    assert advice.chosen.bytes.wire < 0.9 * advice.start.bytes.wire
    assert advice.start.drift.rms < advice.chosen.drift.rms <= advice.limit
    alone = audited(0, 1, 2, {"rules": [dict(rule) for rule in advice.rules]}, confirm=0)
    assert alone.drift == advice.chosen.drift and alone.formats is None
