"""Failures: on all ranks they leave the engine usable; on one rank, or at different places, they end all."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, diff, finish, make
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.api import make_plan
from zerodrift.comm import watch
from zerodrift.comm.mesh import start
from zerodrift.engine.engine import Engine
from zerodrift.engine.native_executor import NativeExecutor
from zerodrift.errors import RankError

pytestmark = pytest.mark.fresh_ranks

TIMEOUT = 2.0
"""Seconds that collectives wait where a rank is missing."""
SOON = 15.0
"""Seconds within which all ranks must end elsewhere; groups wait for ten minutes."""


def until_it_ends(call: Callable[[], Any]) -> tuple[str, float]:
    began, said = time.monotonic(), ""
    try:
        call()
    except (RuntimeError, RankError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - began


class Boom(RuntimeError):  # noqa: N818
    pass


class Bomb(nn.Module):
    """A module that passes its input through until it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed == "forward":
            raise Boom("forward")
        return Fuse.apply(x, self)


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bomb: Bomb) -> torch.Tensor:
        ctx.bomb = bomb
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.bomb.armed == "backward":
            raise Boom("backward")
        return grad, None


def mined() -> tuple[GPT, Bomb]:
    model, bomb = GPT(layers=3), Bomb()
    model.layers[1].mlp = nn.Sequential(model.layers[1].mlp, bomb)
    return model, bomb


def step(engine: Engine, number: int, own: bool = False) -> None:
    for micro in range(2):
        data = batch(number, engine.mesh.rank(), micro)
        if own:
            engine.module(data).backward()
        else:
            engine.backward(engine(data))
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_after_a_failure_the_next_step_is_as_if_nothing_was(stage: int) -> None:
    """A forward or a backward fails in either micro-batch, in the engine's or a user's loop."""
    model, _ = mined()
    clean = make(config(stage, "fp32", 2), model)
    for number in range(3):
        step(clean, number)
    expected = finish(clean).weights
    clean.destroy()
    for own in (False, True):
        model, bomb = mined()
        engine = make(config(stage, "fp32", 2), model)
        for number, (where, micro) in enumerate([("forward", 1), ("backward", 0), ("backward", 1)]):
            if micro:
                engine.backward(engine(batch(99, engine.mesh.rank())))
                engine.step()
            bomb.armed, data = where, batch(98, engine.mesh.rank())
            with pytest.raises(Boom):
                if own and where == "backward":
                    engine.module(data).backward()
                else:
                    engine.backward(engine(data))
            bomb.armed = ""
            if where == "forward":
                engine.zero_grad()  # the first micro-batch is still there, which a clean step has not
            step(engine, number, own)
        assert diff(expected, finish(engine).weights) == [], own
        assert not any(unit.is_full for unit in engine.executor.units if stage == 3)
        engine.destroy()


def impatient(stage: int, mode: str, model: nn.Module, timeout: float) -> Engine:
    """Make an engine whose collectives wait for `timeout` seconds at most."""
    plan = make_plan(config(stage, mode), model, 2)
    return Engine(plan, start(plan.mesh, "cpu", timeout), partial(NativeExecutor, plan, model))


def one_fails(stage: int, where: str) -> tuple[str, float]:
    """Fail on rank 1: raise in the first forward, or exit in the second step."""
    model, bomb = mined()
    engine = impatient(stage, "bf16", model, TIMEOUT)
    fails = engine.mesh.rank() == 1
    if where == "killed":
        step(engine, 0)
        if fails:
            model.layers[1].register_forward_hook(lambda *_: os._exit(9))
    elif fails:
        bomb.armed = where
    return until_it_ends(lambda: step(engine, 1))


@pytest.mark.parametrize(("stage", "where"), [(3, "forward"), (0, "killed")])
def test_what_ends_one_rank_ends_the_others_within_the_timeout(stage: int, where: str) -> None:
    dying = [1] if where == "killed" else []
    (error, seconds), other = run_ranks(one_fails, 2, stage, where, dying=dying)
    assert other is None if dying else other[0] == "Boom: forward"
    assert "rank 1 must take part within the timeout" in error
    assert seconds < 2 * TIMEOUT, "one timeout, not one per collective under way"


@on_ranks(2)
def test_different_plans_fail_fast_on_both_ranks_with_the_first_row_that_differs() -> None:
    rules = [{"match": "*norm2*", "pin": "fp32"}] if torch.distributed.get_rank() else []
    with pytest.raises(RankError) as caught:
        make(config(3, "bf16", precision={"rules": rules}))
    told = r"different ones from row \d+ on: (.*) on rank 0, (.*) on rank 1\. Give"
    rows = re.search(told, str(caught.value))
    assert rows is not None and rows[1] != rows[2], caught.value


class Shuffled(nn.Module):
    """Blocks that add to a stream of width 16, in an order of the caller's."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, w), nn.Linear(w, 16)) for w in widths)

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for number in order:
            x = x + self.layers[number](x)
        return x.square().mean()


@pytest.mark.parametrize(("stage", "widths"), [(3, (16,) * 4), (0, (16, 32, 48, 64))])
@on_ranks(2)
def test_ranks_that_go_through_units_in_different_orders_are_told(
    stage: int, widths: tuple[int, ...]
) -> None:
    """At stage 3 ranks would compute with each other's weights, of equal size or not; at stage 0 nothing
    is gathered, and any order is right. After two good steps rank 1 runs another order."""
    watch.INTERVAL, watch.PATIENCE = 0.1, 0.5
    engine = impatient(stage, "fp32", Shuffled(widths), 60.0)
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        engine.backward(engine(torch.ones(2, 16), order))
        assert engine.step().updated
    last = (0, 2, 1, 3) if engine.mesh.rank() else (1, 0, 2, 3)
    if stage == 0:
        engine.backward(engine(torch.ones(2, 16), last))
        assert engine.step().updated
        return
    told = "^`ranks`: must come to the same collectives"
    for rank in (0, 1):
        told += f"(?=.*rank {rank} in all_gather of `layers\\.)"
    with pytest.raises(RankError, match=told):
        engine.backward(engine(torch.ones(2, 16), last))
        engine.step()


def train_once(engine: Engine) -> None:
    engine.backward(engine(batch(0, engine.mesh.rank())))
    engine.step()


def graphless(engine: Engine) -> None:
    for number in range(2):
        loss = engine(batch(number))
        with contextlib.suppress(RuntimeError):
            engine.backward(torch.zeros(()) if engine.mesh.rank() and not number else loss)
            engine.step()


def skipping(*places: tuple[int, int]) -> Callable[[Engine], None]:
    """Return a case that leaves out the backward of each (rank, number)."""

    def case(engine: Engine) -> None:
        for number in range(3):
            loss = engine(batch(number))
            if (engine.mesh.rank(), number) not in places:
                engine.backward(loss)
                engine.step()

    return case


skipped_differently = skipping((0, 0), (1, 1))
"""Another batch on each rank: at stages 0 to 2 no rank waits."""


def evaluate(engine: Engine) -> None:
    with torch.no_grad():
        engine(batch(5))


def on_rank_0(act: Callable[[Engine], Any]) -> Any:
    """Return a case in which rank 0 acts alone, before all ranks go on."""

    def case(engine: Engine) -> None:
        if engine.mesh.rank() == 0:
            act(engine)
        train_once(engine)

    return case


def left_early(engine: Engine) -> None:
    if engine.mesh.rank() == 1:
        engine.destroy()
        time.sleep(1.0)
        raise RankError.relayed("has left itself")
    train_once(engine)


CASES: list[tuple[Callable[[Engine], None], int]] = [
    (graphless, 0),
    (skipping((1, 0)), 3),
    (on_rank_0(evaluate), 3),
    (on_rank_0(lambda engine: engine.parameter("layers.1.norm1.weight").master), 1),
    (left_early, 3),
    (skipped_differently, 1),
]
"""(what ranks do, stage)."""
COUNTS = {(skipped_differently, 1): "rank 0 1, rank 1 0", (graphless, 0): "rank 0 0, rank 1 1"}
"""Cases in which ranks differ in the backwards of a step, and what is said of them."""


@on_ranks(2, timeout=180.0)
def test_every_rank_says_where_the_others_are() -> None:
    watch.INTERVAL, watch.PATIENCE = 0.1, 0.5
    for number, (case, stage) in enumerate(CASES):
        engine = make(config(stage, "fp32"), GPT(layers=2))
        train_once(engine)
        began, said = time.monotonic(), "nothing was said"
        try:
            case(engine)
            train_once(engine)
            train_once(engine)
        except (RankError, RuntimeError) as error:
            said = str(error)
        at = f"case {number} at stage {stage}: {said}"
        assert time.monotonic() - began < 20.0, at
        if (case, stage) in COUNTS:
            assert f"without one: {COUNTS[case, stage]}" in said, at
        elif engine.mesh.rank() == 0 or case is not left_early:  # which rank 1 did itself
            assert said.startswith("`ranks`: must come to the same collectives"), at
            assert "on every rank, or on none" in said, at
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
            time.sleep(0.5)
        engine.backward(loss)
        assert engine.step().updated
    engine.destroy()
    assert time.monotonic() - began > 0.9
