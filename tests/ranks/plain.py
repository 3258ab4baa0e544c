"""Compare an engine with plain torch: the same model and data in a plain loop must give the same gradient.

All ranks have the same data, so the mean over ranks is the gradient of one, exactly (for 1, 2 or 4 ranks),
and every comparison is bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks
from zerodrift.engine.engine import Engine
from zerodrift.engine.habits.absent_parameter import CollectedGradient

CELLS = [
    (1, 0),
    (2, 3),
    pytest.param(1, 3, marks=pytest.mark.slow),
    pytest.param(2, 0, marks=pytest.mark.slow),
]
"""(ranks, stage)."""


def pair(model: nn.Module, stage: int, micro: int = 1, **rest: Any) -> tuple[Engine, nn.Module]:
    """Return an fp32 engine of a model, and a plain copy of it."""
    plain = copy.deepcopy(model)
    return make(config(stage, "fp32", micro, **rest), model), plain


def differs(engine: Engine, plain: nn.Module, factor: float = 1.0) -> list[str]:
    """Return the parameters whose gradient is not, bit for bit, `factor` times that of the plain model,
    for which a missing one counts as zero."""
    wrong = []
    for name, parameter in plain.named_parameters():
        row = engine.plan.row(name)
        assert row is not None
        if row.columns.update is None:
            continue
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * factor
        if not torch.equal(engine.parameter(name).gradient, expected):
            wrong.append(name)
    return wrong


def differs_more(engine: Engine, plain: nn.Module, factor: float, rtol: float, atol: float) -> list[str]:
    """Return the parameters that differ by more than the ulps of a division or another order; `atol` is a
    part of the largest."""
    wrong = []
    for name in differs(engine, plain, factor):
        grad = plain.get_parameter(name).grad
        assert grad is not None
        near = atol * float(grad.abs().max())
        if not torch.allclose(engine.parameter(name).gradient, grad * factor, rtol=rtol, atol=near):
            wrong.append(name)
    return wrong


def left_behind(engine: Engine) -> list[str]:
    """Return the parameters with a gradient that the engine has not collected."""
    grads = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
    return [
        name for name, grad in grads.items() if grad is not None and not isinstance(grad, CollectedGradient)
    ]


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    with engine.gathered() as values:
        return {name: value.detach().clone() for name, value in values.items()}


def run_all(checks: Sequence[Callable[[int], Any]], stage: int) -> list[str]:
    """Run every check at a stage on this rank, and return the findings."""
    problems = {check.__name__: check(stage) for check in checks}
    return [f"{name}: {problem}" for name, problem in problems.items() if problem]


def on_every_cell(checks: Sequence[Callable[[int], Any]]) -> Callable[[int, int], None]:
    """Return the test of a file's checks."""

    @pytest.mark.parametrize(("world", "stage"), CELLS)
    def test(world: int, stage: int) -> None:
        for found in run_ranks(run_all, world, checks, stage):
            assert found == [], found

    return test
