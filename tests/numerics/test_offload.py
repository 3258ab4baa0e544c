"""`offload_optimizer.device: cpu` changes no bit, on a CPU and with a separate host.

A CPU plays both sides: with a way to copy, an updater treats the tensors of the engine as a device's and
keeps images of its own. The copies, their order and their waits are those of a GPU, and happen at the last
moment that is allowed. Streams of a device are in `tests/device`.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.numerics.networks import GPT
from tests.numerics.pieces import owned
from tests.numerics.runs import Run, config, make, require_alike, train
from tests.ranks.harness import on_ranks
from zerodrift.api import make_plan
from zerodrift.optim.offload import OffloadedUpdater, make_updater
from zerodrift.optim.updater import Owned, Updater
from zerodrift.plan.table import Plan

MUON: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}


class Late:
    """A way to copy that delays everything to the last moment, and logs the requests."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.buffers = 0
        """Number of allocated host buffers."""
        self._pending: list[Ticket] = []

    def host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.buffers += 1
        return torch.full((numel,), 77, dtype=dtype)

    def begin(self) -> None:
        assert not self._pending, "begun twice"
        self.log.append("begin")

    def down(self, host: torch.Tensor, there: torch.Tensor) -> Ticket:
        return Ticket(self.log, "down", host, there)

    def up(self, there: torch.Tensor, host: torch.Tensor) -> Ticket:
        self._pending.append(Ticket(self.log, "up", there, host))
        return self._pending[-1]

    def end(self) -> None:
        self.log.append("end")
        for ticket in self._pending:
            ticket.copy()
        self._pending.clear()


class Ticket:
    """A copy that happens at its first wait."""

    def __init__(self, log: list[str], kind: str, target: torch.Tensor, source: torch.Tensor) -> None:
        self.name = f"{kind} {source.numel()}"
        self._log, self._target, self._source = log, target, source
        self._done = False
        log.append(f"start {self.name}")

    def copy(self) -> None:
        if not self._done:
            self._target.copy_(self._source)
        self._done = True

    def synchronize(self) -> None:
        self._log.append(f"wait {self.name}")
        self.copy()


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
    [
        (0, {}, False, False),
        (1, MUON, False, True),
        (2, {}, True, True),
        (3, STATISTICS, False, True),
        pytest.param(3, MUON, False, False, marks=pytest.mark.slow),
    ],
    ids=["0-adamw", "1-muon", "2-nadam", "3-statistics", "3-muon"],
)
@pytest.mark.long
@on_ranks(2)
def test_offload_changes_no_bit(stage: int, rest: dict[str, Any], own: bool, late: bool) -> None:
    """The host is the CPU itself, or a separate one with late copies."""
    plain = run(stage, "none", rest, own)
    made = functools.partial(make_updater, transfers=Late() if late else None)
    with mock.patch("zerodrift.engine.native_executor.make_updater", made):
        require_alike(plain, run(stage, "cpu", rest, own))


def plan_of(**rest: Any) -> Plan:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    return make_plan(config(2, "bf16", **{"zero_optimization": zero, **rest}), GPT(layers=4), world_size=2)


def pieces(plan: Plan) -> list[Owned]:
    torch.manual_seed(3)
    return owned(plan, {row.name: torch.randn(row.shape) for row in plan.rows}, 0)


def steps(updater: Updater, held: list[Owned], count: int) -> None:
    for number in range(count):
        torch.manual_seed(number)
        updater.update({piece.number: torch.randn(piece.storage.numel()) for piece in held}, 0.5)


def test_copies_overlap_with_the_update_and_wait_for_nothing_else() -> None:
    """A segment goes down beside the update of the one before, and up as soon as its own is done."""
    plan, way = plan_of(), Late()
    held = pieces(plan)
    updater = make_updater(plan, held, None, {}, way)
    assert isinstance(updater, OffloadedUpdater)
    images = way.buffers
    assert images == len(held) > 4
    steps(updater, held, 1)
    way.log.clear()
    steps(updater, held, 1)
    sizes = [piece.storage.numel() for piece in held]
    expected = [f"wait up {size}" for size in sizes] + ["begin"]
    ahead = [f"start down {size}" for size in sizes]
    expected += [ahead.pop(0)]
    for size in sizes:
        expected += [ahead.pop(0)] if ahead else []
        expected += [f"wait down {size}", f"start up {size}"]
    assert way.log == [*expected, "end"]
    # Two buffers of a size take turns, however many segments there are.
    assert way.buffers - images <= 2 * len(set(sizes)) < len(held) + 2


def test_an_update_that_fails_leaves_the_way_open() -> None:
    plan, way = plan_of(), Late()
    held = pieces(plan)
    updater = make_updater(plan, held, None, {}, way)
    wrong = {held[0].number: torch.randn(1)}
    with pytest.raises(AssertionError, match="gradient"):
        updater.update(wrong, 1.0)
    assert way.log[-1] == "end"
    steps(updater, held, 1)
    assert not any((piece.storage == 77).any() for piece in held)


def test_without_offload_a_way_is_not_used() -> None:
    plan, way = make_plan(config(2, "bf16"), GPT(), world_size=2), Late()
    assert not isinstance(make_updater(plan, pieces(plan), None, {}, way), OffloadedUpdater)
    assert way.log == []
