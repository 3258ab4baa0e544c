"""All ranks agree on one way to update, rank 0 logs it, and an engine keeps to it.

There is no GPU here: ranks get a stand-in with the outcome of its first program.
"""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from tests.numerics.runs import config, make, train
from tests.ranks.harness import on_ranks
from zerodrift.api import make_plan
from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import start
from zerodrift.engine.step import update
from zerodrift.kernels import device
from zerodrift.mesh import MeshShape
from zerodrift.optim import fused
from zerodrift.optim.updates import reference_update


def listen() -> list[str]:
    """Collect zerodrift's log from here on."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerodrift").addHandler(handler)
    return heard


REFERENCE, FUSED = "reference_update", "update"
SLOWER = "updates run in plain PyTorch everywhere, several times slower"
CASES: list[tuple[list[str | None], bool, str, list[str]]] = [
    (["no Triton", None, None], False, REFERENCE, [f"zerodrift: no Triton, on rank 0 of 3; {SLOWER}"]),
    ([None, None, "no Triton"], False, REFERENCE, [f"zerodrift: no Triton, on rank 2 of 3; {SLOWER}"]),
    (
        ["no driver", "no driver", "no compiler"],
        False,
        REFERENCE,
        [f"zerodrift: no driver; no compiler, on rank 0, 1, 2 of 3; {SLOWER}"],
    ),
    ([None, None, None], False, FUSED, []),
    # An offloaded optimizer updates on CPUs, whose ways leave the same bits.
    (["no driver", None, None], True, FUSED, []),
]
"""(each rank's obstacle, whether the optimizer is offloaded, the agreed way, what rank 0 logs)."""


@on_ranks(3)
def test_any_rank_that_cannot_run_programs_keeps_all_from_it_and_rank_0_says_why() -> None:
    comm = Collectives(start(lambda world: MeshShape(shard=world), device="cpu"))
    comm.mesh.device = torch.device("cuda", 0)
    heard = listen()
    for obstacles, offload, expected, told in CASES:
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}} if offload else {"stage": 3}
        plan = make_plan(config(3, "bf16", zero_optimization=zero), torch.nn.Linear(8, 8), world_size=3)
        heard.clear()
        mine = obstacles[comm.mesh.rank()]
        with mock.patch.object(device, "obstacle", lambda where: mine), comm.record() as recorded:  # noqa: B023
            way = update.choose_update_function(plan, comm)
        assert way is (fused.update if expected == FUSED else reference_update), obstacles
        assert heard == (told if comm.mesh.rank() == 0 else []) and list(recorded) == [], (heard, recorded)


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
