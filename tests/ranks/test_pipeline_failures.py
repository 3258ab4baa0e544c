"""A piece that raises on one rank ends all ranks within seconds, with the error and its place."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT
from tests.numerics.runs import config
from tests.numerics.test_pipelines import COUNT, LAYERS, data, pipeline
from tests.ranks.harness import on_ranks, run_ranks
from tests.ranks.test_failures import SOON, Bomb, Boom, until_it_ends
from zerodrift.comm import watch
from zerodrift.comm.mesh import start
from zerodrift.comm.shared_errors import Alarm
from zerodrift.mesh import MeshShape

pytestmark = pytest.mark.fresh_ranks


def no_watch() -> bool:
    """Return whether the watch's thread ends soon."""
    for thread in threading.enumerate():
        if thread.name == "zerodrift-watch":
            thread.join(timeout=5)
    return all(thread.name != "zerodrift-watch" for thread in threading.enumerate())


CASES = [
    ("1f1b", "forward", 0, False, 2),
    ("dualpipev", "backward", 0, True, 2),
    ("1f1b", "forward", 3, True, 4),
    pytest.param("interleaved-zero-bubble", "backward", 1, True, 2, marks=pytest.mark.slow),
]
"""(schedule, place, rank, whether in a later step, ranks)."""


@pytest.mark.parametrize(("schedule", "where", "rank", "later", "world"), CASES)
@on_ranks()
def test_all_ranks_end_and_say_why(schedule: str, where: str, rank: int, later: bool, world: int) -> None:
    model, bomb = GPT(LAYERS, tied=False), Bomb()
    layer = model.layers[LAYERS - 1 if rank else 0]
    layer.mlp = nn.Sequential(layer.mlp, bomb)
    engine = pipeline(config(0, "fp32", COUNT), schedule, None, model, stages=world)
    tokens = data(0, engine.mesh.rank("data"))
    if later:
        engine.train_batch(tokens)
    if engine.mesh.rank() == rank:
        bomb.armed = where
    first, seconds = until_it_ends(lambda: (engine.evaluate if world == 4 else engine.train_batch)(tokens))
    again, more = until_it_ends(lambda: engine.train_batch(tokens))
    engine.destroy()
    said = f"got Boom: {where} on rank {rank}"
    if engine.mesh.rank() == rank:
        assert first == f"Boom: {where}", first
    else:
        assert first.startswith("RankError: `pipeline`: ") and said in first, first
    assert said in again, f"it is over for good: {again}"
    assert seconds < SOON and more < SOON and no_watch()


def test_a_rank_that_is_killed_ends_the_others_with_a_rank_error() -> None:
    """The middle one of three stages is killed."""
    first, _, last = run_ranks(ends_after_a_kill, 3, dying=[1])
    assert first.startswith("RankError: `") and last.startswith("RankError: `"), (first, last)


def ends_after_a_kill() -> str:
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS, tied=False), stages=3)
    engine.train_batch(data(0, 0))
    if engine.mesh.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return until_it_ends(lambda: engine.train_batch(data(0, 0)))[0]


@on_ranks(2)
def test_the_store_alone_ends_a_wait() -> None:
    """Wait for a rank that has ended with open connections, as on NCCL, so that only the store tells."""
    watch.INTERVAL = 0.1
    mesh = start(MeshShape(pipeline=2), "cpu")
    mine = Alarm(mesh)
    if mesh.rank() == 1:
        mesh.watch._cut = lambda: None  # type: ignore[method-assign]

    def meet() -> None:
        with mine.raised("meeting", "waiting"):
            if mesh.rank() == 1:
                raise Boom("away")
            received = torch.empty(1)
            torch.distributed.recv(received, group=mesh.group("pipeline"), group_src=1)
            received.item()  # on a device, the wait is here

    said, seconds = until_it_ends(meet)
    if mesh.rank() == 1:
        assert said == "Boom: away"
        time.sleep(2.7)  # the other one's wait must not end because this process does
    else:
        assert "got Boom: away on rank 1" in said and seconds < 2.5
    mine.stop()
    mesh.stop()
