"""`offload_optimizer.device: cpu` changes no bit, on a CPU and with a separate host.

A CPU plays both sides: with a way to copy, an updater treats the tensors of the engine as a device's and
keeps images of its own. The copies are those of a GPU, and happen at the last moment that is allowed. Streams
of a device are in `tests/device`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.numerics.networks import GPT
from tests.numerics.pieces import owned
from tests.numerics.runs import Run, config, make, require_alike, train
from tests.ranks.harness import on_ranks
from zerodrift.api import make_plan
from zerodrift.optim.offload import make_updater

MUON: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}


class Late:
    """A way to copy that delays everything to the last moment."""

    def __init__(self) -> None:
        self.is_open = False
        self._uploads: list[Ticket] = []

    def host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel,), 77, dtype=dtype)

    def begin(self) -> None:
        assert not self.is_open, "begun twice"
        assert all(ticket.is_awaited for ticket in self._uploads), "an image may be written while it is read"
        self.is_open = True
        self._uploads.clear()

    def down(self, host: torch.Tensor, there: torch.Tensor) -> Ticket:
        return Ticket(host, there)

    def up(self, there: torch.Tensor, host: torch.Tensor) -> Ticket:
        self._uploads.append(Ticket(there, host))
        return self._uploads[-1]

    def end(self) -> None:
        self.is_open = False
        for ticket in self._uploads:
            ticket.copy()


@dataclass
class Ticket:
    """A copy that happens at its first wait."""

    target: torch.Tensor
    source: torch.Tensor
    is_done: bool = False
    is_awaited: bool = False

    def copy(self) -> None:
        if not self.is_done:
            self.target.copy_(self.source)
        self.is_done = True

    def synchronize(self) -> None:
        self.copy()
        self.is_awaited = True


def run(stage: int, device: str, rest: dict[str, Any], own: bool = False) -> Run:
    zero = {"stage": stage, "offload_optimizer": {"device": device, "pin_memory": True}}
    settings = config(stage, "bf16", 2, **{"zero_optimization": zero, **rest})
    model = GPT(moe=True, layers=1)
    optimizer = None
    if own:
        settings.pop("optimizer")
        optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
    engine = make(settings, model, optimizer=optimizer)
    found = train(engine, 3, 2)
    assert engine.plan.policy.sharding.offload == (device == "cpu")
    told = [decision.value for decision in engine.plan.policy.decisions if decision.key == "offload"]
    assert told == (["master and state"] if device == "cpu" else [])
    if "precision" in rest:
        found.losses.append(hash(engine.update_statistics()))
    # What is set from outside reaches the images too, and comes back.
    name = engine.plan.rows[0].name
    engine.parameter(name).master = engine.parameter(name).master * 1.5
    for key, value in engine.parameter(name).state.items():
        engine.parameter(name).state[key] = value * 0.5
    again = train(engine, 2, 2)
    return replace(again, losses=found.losses + again.losses, norms=found.norms + again.norms)


STATISTICS: dict[str, Any] = {"precision": {"statistics": True, "state": "bf16-stochastic"}}


@pytest.mark.parametrize(
    ("stage", "rest", "own", "late"),
    [(0, {}, False, False), (1, MUON, False, True), (2, {}, True, True), (3, STATISTICS, False, True)],
    ids=["adamw", "muon", "nadam", "statistics"],
)
@pytest.mark.long
@on_ranks(2)
def test_offload_changes_no_bit(stage: int, rest: dict[str, Any], own: bool, late: bool) -> None:
    """The host is the CPU itself, or a separate one with late copies."""
    plain = run(stage, "none", rest, own)
    made = functools.partial(make_updater, transfers=Late() if late else None)
    with mock.patch("zerodrift.engine.native_executor.make_updater", made):
        require_alike(plain, run(stage, "cpu", rest, own))


def test_an_update_that_fails_leaves_the_way_open() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    plan = make_plan(config(2, "bf16", zero_optimization=zero), GPT(layers=4), world_size=2)
    held, way = owned(plan, {row.name: torch.randn(row.shape) for row in plan.rows}, 0), Late()
    updater = make_updater(plan, held, None, {}, way)
    with pytest.raises(AssertionError, match="gradient"):
        updater.update({held[0].number: torch.randn(1)}, 1.0)
    assert not way.is_open
    updater.update({piece.number: torch.randn(piece.storage.numel()) for piece in held}, 0.5)
    assert not any((piece.storage == 77).any() for piece in held)
