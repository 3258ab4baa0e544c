"""Ranks at different places get an error soon; slow ones are waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, make
from tests.ranks.harness import on_ranks
from zerodrift.comm import watch
from zerodrift.comm.watch import WaitReport, stuck
from zerodrift.engine.engine import Engine
from zerodrift.errors import RankError

SOON = 20.0
"""Seconds within which all ranks must end; groups wait for ten minutes."""


def step(engine: Engine, number: int = 0) -> None:
    engine.backward(engine(batch(number, engine.mesh.rank())))
    engine.step()


def graphless(engine: Engine) -> None:
    for number in range(2):
        loss = engine(batch(number))
        with contextlib.suppress(RuntimeError):
            engine.backward(torch.zeros(()) if engine.mesh.rank() and not number else loss)
            engine.step()


def skipping(engine: Engine, *places: tuple[int, int]) -> None:
    """Leave out the backward of each (rank, number)."""
    for number in range(3):
        loss = engine(batch(number))
        if (engine.mesh.rank(), number) not in places:
            engine.backward(loss)
            engine.step()


def skipped(engine: Engine) -> None:
    skipping(engine, (1, 0))


def skipped_differently(engine: Engine) -> None:
    """Skip another batch on each rank: at stages 0 to 2 no rank waits."""
    skipping(engine, (0, 0), (1, 1))


def evaluate(engine: Engine) -> None:
    with torch.no_grad():
        engine(batch(5))


def show(engine: Engine) -> None:
    with engine.gathered():
        pass


def on_rank_0(act: Callable[[Engine], Any], then: Callable[[Engine], Any] = step) -> Any:
    """Return a case in which rank 0 acts alone, before all ranks go on."""

    def case(engine: Engine) -> None:
        if engine.mesh.rank() == 0:
            act(engine)
        then(engine)

    return case


before_a_barrier = on_rank_0(evaluate, lambda engine: dist.barrier(group=engine.mesh.group("world")))


def left_early(engine: Engine) -> None:
    if engine.mesh.rank() == 1:
        engine.destroy()
        time.sleep(1.0)
        raise RankError.relayed("has left itself")
    step(engine)


Case = tuple[Callable[[Engine], None], int]
"""(what ranks do, stage)."""
SOME: list[Case] = [
    (graphless, 0),
    (skipped, 3),
    (on_rank_0(evaluate), 3),
    (on_rank_0(lambda engine: engine.parameter("layers.1.norm1.weight").master), 1),
    (left_early, 3),
    (skipped_differently, 1),
]
OTHERS: list[Case] = [
    (graphless, 3),
    (before_a_barrier, 3),
    (on_rank_0(show), 3),
    (on_rank_0(Engine.step), 1),
    (left_early, 0),
]
CASES = {"some": SOME, "others": OTHERS}


COUNTS = {(skipped_differently, 1): "rank 0 1, rank 1 0", (graphless, 0): "rank 0 0, rank 1 1"}
"""Cases in which ranks differ in the backwards of a step, and what is said of them."""


@pytest.mark.parametrize("cases", ["some", pytest.param("others", marks=pytest.mark.slow)])
@on_ranks(2, timeout=180.0)
def test_every_rank_says_where_the_others_are(cases: str) -> None:
    watch.INTERVAL, watch.PATIENCE = 0.1, 0.5
    for number, (case, stage) in enumerate(CASES[cases]):
        engine = make(config(stage, "fp32"), GPT(layers=2))
        step(engine)
        began, said = time.monotonic(), "nothing was said"
        try:
            case(engine)
            step(engine)
            step(engine)
        except (RankError, RuntimeError) as error:
            said = str(error)
        at = f"case {number} at stage {stage}: {said}"
        assert time.monotonic() - began < SOON, at
        if (case, stage) in COUNTS:
            assert f"without one: {COUNTS[case, stage]}" in said, at
        # Rank 1 left itself, or is in somebody else's collective, whose connections are gone.
        elif engine.mesh.rank() == 0 or case not in (left_early, before_a_barrier):
            assert said.startswith("`ranks`: must come to the same collectives"), at
            assert "must be done on every rank" in said, at
        dist.barrier()
        engine.destroy()


@on_ranks(2)
def test_a_rank_that_is_slow_is_waited_for() -> None:
    """The rank is late by more than the patience of the others, in the middle of a step."""
    watch.INTERVAL, watch.PATIENCE = 0.05, 0.2
    engine = make(config(3, "fp32"), GPT(layers=2))
    began = time.monotonic()
    for number in range(2):
        loss = engine(batch(number))
        if engine.mesh.rank() == number:
            time.sleep(0.8)
        engine.backward(loss)
        assert engine.step().updated
    engine.destroy()
    assert time.monotonic() - began > 1.2


def place(
    group: str = "range(0, 2)", number: int = 0, needs: tuple[int, ...] = (), **more: Any
) -> WaitReport:
    given = {"beat": 0, "serial": "", "what": "gather of a", "at": "", **more}
    return WaitReport(group=group, number=number, needs=needs, **given)


def test_only_a_circle_is_stuck() -> None:
    """(places of the ranks, ranks that have left) -> ranks that can never go on."""
    group = "range(0, 3)"
    here = {group: (5, ("gather of a",))}
    other = {group: (5, ("gather of b",))}
    behind = {group: (4, ("gather of z",))}
    at = [tuple(rank for rank in range(3) if rank != mine) for mine in range(3)]
    same = {rank: place(group, 4, at[rank], trails=here) for rank in range(3)}
    assert stuck(same, [], 3) == []
    two = {rank: same[rank] for rank in (0, 1)}
    assert stuck(two, [], 3) == [], "the third is busy"
    assert stuck(two, [2], 3) == [0, 1], "the third has left"
    differs = {**same, 2: place(group, 4, at[2], what="gather of b", trails=other)}
    assert stuck(differs, [], 3) == [0, 1, 2]
    chain = {0: same[0], 1: place("range(1, 3)", 7, (2,), trails=behind)}
    assert stuck(chain, [], 3) == [], "one waits for another, which waits for one that is busy"
    in_call = {0: same[0], 1: same[1], 2: place("", 0, at[2], trails=behind)}
    assert stuck(in_call, [], 3) == [0, 1, 2]
    assert stuck({0: same[0], 2: in_call[2]}, [], 3) == [], "a call counts where nobody is busy"


def test_a_place_is_read_as_it_was_written_and_the_last_words_of_a_trail_are_kept() -> None:
    here = place(number=3, needs=[1], trails={"range(0, 2)": [4, ["a", "b"]]})
    assert WaitReport.read(here.write().encode()) == here
    trail = watch.CollectiveLog(range(2))
    for number in range(watch.KEPT + 3):
        assert trail.begin("gather", f"ü `x`{number}").number == number
    assert trail.last()[-1] == f"gather of ü `x`{watch.KEPT + 2}" and len(trail.last()) == watch.KEPT
