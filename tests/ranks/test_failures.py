"""A failure on all ranks leaves the engine usable; on one rank, it ends the others with an error."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from typing import Any

import pytest
import torch
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

TIMEOUT = 3.0
"""Timeout of collectives where a rank is missing."""


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
    model = GPT(layers=3)
    bomb = Bomb()
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


def impatient(
    stage: int, mode: str = "bf16", model: nn.Module | None = None, timeout: float = TIMEOUT
) -> Engine:
    """Make an engine whose collectives wait for `timeout` at most."""
    model = model if model is not None else GPT(layers=3)
    plan = make_plan(config(stage, mode), model, 2)
    return Engine(plan, start(plan.mesh, "cpu", timeout), partial(NativeExecutor, plan, model))


def waits(engine: Engine, steps: int = 3) -> tuple[str, float]:
    """Train until the other rank is missed; return the error, and the seconds until then."""
    began = time.monotonic()
    try:
        for number in range(steps):
            engine.backward(engine(batch(number)))
            engine.step()
    except RankError as error:
        return str(error), time.monotonic() - began
    return "nothing was missed", time.monotonic() - began


def one_fails(stage: int, where: str) -> tuple[str, float]:
    """Fail on rank 1: raise in the first forward or backward, or exit in the second step."""
    model, bomb = mined()
    engine = impatient(stage, model=model)
    if where == "killed":
        engine.backward(engine(batch(0)))
        engine.step()
    if engine.mesh.rank() == 0:
        return waits(engine)
    if where == "killed":
        model.layers[1].register_forward_hook(lambda *_: os._exit(9))
        return waits(engine)
    bomb.armed = where
    with pytest.raises(Boom):
        engine.backward(engine(batch(0)))
    return "raised", 0.0


FATES = [
    (3, "forward"),
    (0, "killed"),
    *(pytest.param(*fate, marks=pytest.mark.slow) for fate in ((0, "backward"), (3, "killed"))),
]


@pytest.mark.parametrize(("stage", "where"), FATES)
def test_what_ends_one_rank_ends_the_others_within_the_timeout(stage: int, where: str) -> None:
    dying = [1] if where == "killed" else []
    (error, seconds), other = run_ranks(one_fails, 2, stage, where, dying=dying)
    assert other == (None if dying else ("raised", 0.0))
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


@pytest.mark.parametrize(
    ("stage", "widths"),
    [(3, (16,) * 4), (0, (16, 32, 48, 64)), pytest.param(3, (16, 32, 48, 64), marks=pytest.mark.slow)],
)
@on_ranks(2)
def test_ranks_that_go_through_units_in_different_orders_are_told(
    stage: int, widths: tuple[int, ...]
) -> None:
    """At stage 3 ranks would compute with each other's weights, of equal size or not; at stage 0 nothing
    is gathered, and any order is right. After two good steps rank 1 runs another order."""
    watch.INTERVAL, watch.PATIENCE = 0.1, 0.5
    engine = impatient(stage, "fp32", model=Shuffled(widths), timeout=60.0)
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
