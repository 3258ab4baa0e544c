"""8-bit moments in an engine: the same bits on any stage and any number of ranks, and training that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import Run, config, make, same, train
from tests.ranks.harness import run_ranks
from zerodrift.engine.engine import Engine
from zerodrift.errors import UnsupportedError
from zerodrift.optim.rounding import Code, encode
from zerodrift.plan.bill import cost

STAGES = (0, 1, 2, 3)


def engine_of(stage: int, state: str = "8bit", **rest: Any) -> Engine:
    return make(config(stage, "bf16", precision={"state": state}, **rest), GPT())


KINDS: dict[str, dict[str, float]] = {
    "AdamW": {"lr": 3e-3},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Lion": {"lr": 3e-3},
}


def everybody(step: int, rank: int, micro: int) -> torch.Tensor:
    """Return the same data on every rank, so that bf16 gradients of four ranks add up exactly in fp32."""
    return batch(step)


def at_stages(stages: tuple[int, ...], kind: str, steps: int) -> list[Run]:
    runs = []
    for stage in stages:
        engine = engine_of(stage, optimizer={"type": kind, "params": KINDS[kind]})
        runs.append(train(engine, steps, data=everybody))
        engine.destroy()
    return runs


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_learns(kind: str) -> None:
    ((run,),) = run_ranks(at_stages, 1, (0,), kind, 12)
    assert run.losses[-1] < run.losses[0] - 0.05


Worlds = dict[int, tuple[int, ...]]
"""Ranks -> stages."""

EVERYWHERE: Worlds = dict.fromkeys((1, 2, 4), STAGES)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "steps", "worlds"),
    [
        ("AdamW", 3, {1: (0,), 2: (0, 3), 4: (3,)}),
        ("SGD", 3, {1: (3,), 2: (1, 2), 4: (0,)}),
        *(
            pytest.param(kind, steps, EVERYWHERE, marks=pytest.mark.slow)
            for kind in KINDS
            for steps in (3, 12)
        ),
    ],
)
def test_stages_and_world_sizes_are_the_same_bits(kind: str, steps: int, worlds: Worlds) -> None:
    """Losses, norms, weights, masters and moments agree."""
    runs = [
        run
        for world, stages in worlds.items()
        for run in run_ranks(at_stages, world, stages, kind, steps, timeout=200)[0]
    ]
    assert len(runs) == sum(map(len, worlds.values()))
    assert same(runs) == []
    assert all(value.any() for state in runs[0].states.values() for value in state.values())


def test_a_written_moment_is_the_nearest_that_can_be_held() -> None:
    (found,) = run_ranks(assign_moments, 1)
    for given, held in found:
        assert torch.equal(held, given), "settled values are kept"


def assign_moments() -> list[tuple[torch.Tensor, torch.Tensor]]:
    engine = engine_of(0)
    train(engine, 1)
    name, found = "layers.0.mlp.up.weight", []
    for key, code in (("exp_avg", Code.SIGNED), ("exp_avg_sq", Code.UNSIGNED)):
        wish = torch.randn(64 * 32, generator=torch.Generator().manual_seed(1))
        wish = wish if code is Code.SIGNED else wish.square()
        engine.parameter(name).state[key] = wish.view(64, 32)
        held = engine.parameter(name).state[key].flatten()
        _, scales = encode(code, wish)
        assert torch.equal(held.view(-1, 256).abs().amax(1), scales)
        assert 0 < (held - wish).abs().max() < 0.1 * wish.abs().max()
        engine.parameter(name).state[key] = held.view(64, 32)
        found.append((held, engine.parameter(name).state[key].flatten()))
    engine.destroy()
    return found


def learned(state: str) -> tuple[float, float]:
    """Return the mean loss of the last 20 of 200 steps, and bytes of moments per parameter."""
    engine = engine_of(3, state)
    run = train(engine, 200, data=lambda step, rank, micro: batch(step % 8, rank))
    bill = cost(engine.plan)
    engine.destroy()
    return sum(run.losses[-20:]) / 20, bill.rest.state / (bill.parameters + bill.padding)


@pytest.mark.long
def test_it_learns_as_fp32_moments_do() -> None:
    found = {state: run_ranks(learned, 1, state, timeout=120)[0] for state in ("fp32", "8bit")}
    loss, size = found["8bit"]
    expected, usual = found["fp32"]
    assert expected < 2.5, f"nothing was learned: {expected}"
    assert loss == pytest.approx(expected, abs=0.1)
    assert (size, usual) == (2 * (1 + 4 / 256), 8)


def with_own(kind: str, state: str, beta2: float) -> str:
    model = GPT()
    own = getattr(torch.optim, kind)(model.parameters(), betas=(0.9, beta2))
    try:
        make(config(0, "bf16", precision={"state": state}, optimizer=None), model, optimizer=own).destroy()
    except UnsupportedError as error:
        return str(error)
    return ""


def all_of_adamw() -> dict[tuple[str, float], str]:
    states = ("fp32", "bf16", "bf16-stochastic", "8bit")
    cases = [(state, beta2) for state in states for beta2 in (0.98, 0.999)]
    return {case: with_own("AdamW", *case) for case in cases}


def test_a_torch_optimizer_that_keeps_its_own_moments_refuses_it() -> None:
    assert "`state: 8bit`: must be fp32" in run_ranks(with_own, 1, "NAdam", "8bit", 0.999)[0]


def test_a_torch_optimizer_brings_no_beta2_that_its_state_cannot_follow() -> None:
    """The plan does not see the beta2 of an optimizer object."""
    (found,) = run_ranks(all_of_adamw, 1)
    refused = found.pop(("bf16", 0.999))
    assert "param_groups[0]" in refused and "0.999" in refused
    assert set(found.values()) == {""}
