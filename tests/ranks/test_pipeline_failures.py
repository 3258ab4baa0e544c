"""A piece that raises on one rank ends all ranks within seconds, with the error and its place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT
from tests.numerics.runs import config
from tests.numerics.test_pipelines import COUNT, LAYERS, data, pipeline
from tests.ranks.harness import on_ranks, run_ranks
from tests.ranks.test_failures import Bomb, Boom
from zerodrift.comm import watch
from zerodrift.comm.mesh import start
from zerodrift.comm.shared_errors import Alarm
from zerodrift.engine.engine import Engine
from zerodrift.errors import RankError
from zerodrift.mesh import MeshShape

pytestmark = pytest.mark.fresh_ranks

SOON = 15.0
"""Seconds within which all ranks must end; groups wait for ten minutes."""


def until_it_ends(call: Callable[[], Any]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        call()
    except (RuntimeError, RankError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


def no_watch() -> bool:
    """Return whether the watch's thread ends soon."""
    for thread in threading.enumerate():
        if thread.name == "zerodrift-watch":
            thread.join(timeout=5)
    return all(thread.name != "zerodrift-watch" for thread in threading.enumerate())


CASES = [
    ("1f1b", "forward", 0, False, 2),
    ("gpipe", "backward", 1, True, 2),
    ("dualpipev", "backward", 0, True, 2),
    ("1f1b", "forward", 3, True, 4),
    pytest.param("1f1b", "backward", 1, True, 2, marks=pytest.mark.slow),
    pytest.param("zbv", "forward", 0, True, 2, marks=pytest.mark.slow),
    pytest.param("interleaved-zero-bubble", "forward", 1, True, 2, marks=pytest.mark.slow),
    pytest.param("zbv", "backward", 0, True, 4, marks=pytest.mark.slow),
]
"""(schedule, place, rank, whether in a later step, ranks); 4 ranks are 4 stages or two pipelines."""


@pytest.mark.parametrize(("schedule", "where", "rank", "later", "world"), CASES)
@on_ranks()
def test_all_ranks_end_and_say_why(schedule: str, where: str, rank: int, later: bool, world: int) -> None:
    model, bomb = GPT(LAYERS, tied=False), Bomb()
    layer = model.layers[LAYERS - 1 if rank else 0]
    layer.mlp = nn.Sequential(layer.mlp, bomb)
    four = schedule in ("gpipe", "1f1b") and world == 4
    engine = pipeline(config(0, "fp32", COUNT), schedule, None, model, stages=4 if four else 2)
    tokens = data(0, engine.mesh.rank("data"))
    if later:
        engine.train_batch(tokens)
    if engine.mesh.rank() == rank:
        bomb.armed = where
    first, seconds = until_it_ends(lambda: engine.train_batch(tokens))
    again, more = until_it_ends(lambda: engine.train_batch(tokens))
    engine.destroy()
    said = f"got Boom: {where} on rank {rank}"
    if engine.mesh.rank() == rank:
        assert first == f"Boom: {where}", first
    else:
        assert first.startswith("RankError: `pipeline`: ") and said in first, first
    assert said in again, f"it is over for good: {again}"
    assert seconds < SOON and more < SOON and no_watch()


def require_one_end(engine: Engine, calls: list[Callable[[], Any]]) -> None:
    """Make calls, of which the first ends in an error on rank 1: it is said again, and not what it left."""
    reports = [until_it_ends(call) for call in calls]
    engine.destroy()
    (first, _), *later = reports
    told = "got Boom: late on rank 1"
    assert first == "Boom: late" if engine.mesh.rank() else told in first, first
    assert all(told in text for text, _ in later), later
    assert all(seconds < SOON for _, seconds in reports)


@on_ranks(2)
def test_what_ended_all_between_two_halves_is_said_again() -> None:
    """One rank raises when the other has run all its micro-batches, and learns of it in `step`."""
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS, tied=False))
    tokens = data(0, 0)
    engine.accumulate(tokens)
    act = engine.step if engine.mesh.rank() == 0 else lambda: _raise_in(engine)
    require_one_end(engine, [act, lambda: engine.train_batch(tokens), lambda: engine.evaluate(tokens)])


def _raise_in(engine: Engine) -> None:
    with engine.executor._alarm.raised("pipeline", "the schedule"):  # type: ignore[attr-defined]
        raise Boom("late")


@on_ranks(2)
def test_an_error_of_the_engine_itself_ends_an_evaluation_on_all() -> None:
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS, tied=False))
    engine.train_batch(data(0, 0))
    with pytest.MonkeyPatch.context() as patch:
        if engine.mesh.rank() == 1:
            patch.setattr("zerodrift.pipeline.stage.one_number", lambda loss: _boom())
        require_one_end(engine, [lambda: engine.evaluate(data(0, 0))])


def _boom() -> Any:
    raise Boom("late")


def waits_for_one_that_keeps_its_connections() -> tuple[str, float]:
    """Wait for a rank that has ended with open connections, as on NCCL, so that only the store tells."""
    watch.INTERVAL = 0.1
    mesh = start(MeshShape(pipeline=2), "cpu")
    mine = Alarm(mesh)
    if mesh.rank() == 1:
        mesh.watch._cut = lambda: None  # type: ignore[method-assign]
    found = until_it_ends(lambda: _meet(mine, mesh))
    if mesh.rank() == 1:
        time.sleep(3.2)  # the other one's wait must not end because this process does
    mine.stop()
    mesh.stop()
    return found


def _meet(mine: Alarm, mesh: Any) -> None:
    with mine.raised("meeting", "waiting"):
        if mesh.rank() == 1:
            raise Boom("away")
        received = torch.empty(1)
        torch.distributed.recv(received, group=mesh.group("pipeline"), group_src=1)
        received.item()  # on a device, the wait is here


def test_the_store_alone_ends_a_wait() -> None:
    (waited, seconds), (raised, _) = run_ranks(waits_for_one_that_keeps_its_connections, 2)
    assert raised == "Boom: away"
    assert "got Boom: away on rank 1" in waited
    assert seconds < 3


@on_ranks(2)
def test_a_step_that_goes_well_asks_nobody() -> None:
    """The training thread does not query the store."""
    asked: list[str] = []
    read = watch.read_key

    def counted(store: Any, key: str) -> bytes:
        asked.append(threading.current_thread().name)
        return read(store, key)

    watch.read_key = counted
    engine = pipeline(config(0, "fp32", COUNT), "zbv", None, GPT(LAYERS, tied=False))
    for step in range(3):
        engine.train_batch(data(step, 0))
    engine.destroy()
    watch.read_key = read
    assert no_watch() and "MainThread" not in asked
