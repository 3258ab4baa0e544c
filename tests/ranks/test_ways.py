"""All ranks agree on one way to update, rank 0 logs it, and an engine keeps to it.

There is no GPU here: ranks get a stand-in with the outcome of its first program.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.numerics.runs import config, make, train
from tests.ranks.harness import on_ranks, run_ranks
from tests.ranks.test_own_optimizers import listen
from zerodrift.api import make_plan
from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import start
from zerodrift.engine.step import update
from zerodrift.kernels import device
from zerodrift.mesh import MeshShape
from zerodrift.optim import fused
from zerodrift.optim.updates import reference_update


def agree(obstacles: list[str | None], offload: bool = False) -> tuple[str, list[str], list[str]]:
    """Return, on a rank with its own obstacle, the agreed way, the log, and the collectives."""
    comm = Collectives(start(lambda world: MeshShape(shard=world), device="cpu"))
    comm.mesh.device = torch.device("cuda", 0)
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}} if offload else {"stage": 3}
    written = config(3, "bf16", zero_optimization=zero)
    plan = make_plan(written, torch.nn.Linear(8, 8), world_size=len(obstacles))
    mine, heard = obstacles[comm.mesh.rank()], listen()
    with mock.patch.object(device, "obstacle", lambda where: mine), comm.record() as recorded:
        way = update.choose_update_function(plan, comm)
    assert way in (fused.update, reference_update)
    return way.__name__, heard, [str(entry) for entry in recorded]


@pytest.mark.parametrize("number", range(3))
def test_a_rank_that_cannot_run_programs_keeps_all_from_it(number: int) -> None:
    """Any one rank decides; rank 0 logs it once."""
    obstacles = [None if rank != number else "Triton is not installed" for rank in range(3)]
    found = run_ranks(agree, 3, obstacles)
    assert [way for way, _, _ in found] == ["reference_update"] * 3
    told = (
        f"zerodrift: Triton is not installed, on rank {number} of 3; updates run in plain PyTorch "
        "everywhere, several times slower"
    )
    assert [said for _, said, _ in found] == [[told], [], []]


def test_reasons_are_said_once_each() -> None:
    (_, said, _), *_ = run_ranks(agree, 3, ["no driver", "no driver", "no compiler"])
    assert said[0].startswith("zerodrift: no driver; no compiler, on rank 0, 1, 2 of 3; ")


@pytest.mark.parametrize(("obstacles", "offload"), [([None, None], False), (["no driver", None], True)])
def test_where_all_can_or_need_not_nothing_is_said(obstacles: list[str | None], offload: bool) -> None:
    """An offloaded optimizer updates on CPUs, whose ways leave the same bits."""
    assert run_ranks(agree, 2, obstacles, offload) == [("update", [], [])] * 2


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-3}}}


@pytest.mark.parametrize("rest", [{}, MUON], ids=["adamw", "muon"])
@on_ranks(2)
def test_an_engine_updates_in_the_way_that_was_agreed(rest: dict[str, Any]) -> list[str]:
    """Each slice has the bits of a plain run."""
    calls: list[Any] = []

    def way(*arguments: Any) -> None:
        calls.append(arguments)
        reference_update(*arguments)

    with mock.patch("zerodrift.engine.native_executor.choose_update_function", lambda plan, comm: way):
        engine = make(config(3, "bf16", **rest))
    with mock.patch.object(fused, "_update_compiled", side_effect=AssertionError("another way")):
        run = train(engine, 2)
    updates = [segment.columns.update for segment in engine.plan.segments]
    expected = sum(update is not None and update.optimizer != "Muon" for update in updates)
    assert len(calls) == 2 * expected > 0
    return run.differs(train(make(config(3, "bf16", **rest)), 2))
