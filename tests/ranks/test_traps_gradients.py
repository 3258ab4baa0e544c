"""Gradients that are late, absent on some ranks, or not there at all, and parameters of odd kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks
from tests.ranks.plain import CELLS, differs, left_behind, pair, run_all
from zerodrift.engine.engine import Engine
from zerodrift.errors import RankError

WIDTH = 8


class Routed(nn.Module):
    """A block whose expert is called where it is told to be."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        x = self.dense(x)
        for number in chosen:
            x = x + self.experts[number](x)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.into = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Routed() for _ in range(3))
        self.never = nn.Parameter(torch.ones(3))

    def forward(
        self,
        x: torch.Tensor,
        chosen: tuple[int, ...] = (0, 1),
        skip: tuple[int, ...] = (),
        recompute: bool = False,
    ) -> torch.Tensor:
        x = self.into(x)
        for number, layer in enumerate(self.layers):
            if number in skip:
                continue
            x = checkpoint(layer, x, chosen, use_reentrant=False) if recompute else layer(x, chosen)
        return x.square().mean()


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def by_rank(engine: Engine, plain: nn.Module, calls: list[dict[str, Any]], stage: int) -> list[str]:
    """Every rank makes its own call; the plain model makes all of them, and halves the sum."""
    ranks = engine.mesh.size("data")
    engine.backward(engine(data(), **calls[engine.mesh.rank() % len(calls)]))
    for call in calls[:ranks] if ranks > 1 else calls[:1]:
        plain(data(), **call).backward()
    wrong = differs(engine, plain, 1.0 / ranks)
    engine.step()
    engine.destroy()
    return wrong


def a_unit_unused_on_one_rank(stage: int) -> Any:
    """Its gradient is still reduced, and at stage 3 it is gathered in its turn: one, several, or all."""
    found = []
    for skip in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)):
        engine, plain = pair(Net(), stage)
        found += by_rank(engine, plain, [{}, {"skip": skip}], stage)
    return found


def units_of_experts(stage: int) -> Any:
    """Each expert a unit inside its block's: rank 0 sends tokens to one, rank 1 to another."""
    found = []
    units = {"sharding": {"units": ["layers.*", "layers.*.experts.*"]}}
    for calls in ([{"chosen": (0,)}, {"chosen": (1,)}], [{"chosen": (0, 1)}, {"chosen": (1,)}]):
        engine, plain = pair(Net(), stage, **units)
        found += by_rank(engine, plain, calls, stage)
        engine, plain = pair(Net(), stage, **units)
        again = [{**call, "recompute": True} for call in calls]
        found += by_rank(engine, plain, again, stage)
    return found


def first_used_in_the_last_micro_batch(stage: int) -> Any:
    engine, plain = pair(Net(), stage, 3)
    for micro, call in enumerate([{"chosen": ()}, {"skip": (0, 1)}, {"chosen": (1,)}]):
        engine.backward(engine(data(micro), **call))
        plain(data(micro), **call).backward()
    wrong = differs(engine, plain, 1 / 3)
    # The mean over three is not exact: autograd's sums agree to the last bit, the division may not.
    wrong = [name for name in wrong if not _close(engine, plain, name, 1 / 3)]
    engine.destroy()
    return wrong


def _close(engine: Engine, plain: nn.Module, name: str, factor: float) -> bool:
    grad = plain.get_parameter(name).grad
    assert grad is not None
    return torch.allclose(engine.parameter(name).gradient, grad * factor, rtol=1e-6, atol=1e-9)


# --- frozen on some ranks ---------------------------------------------------------------------------


def freezing_on_some_ranks_is_an_error(stage: int) -> Any:
    model = Net()
    engine = make(config(stage, "fp32"), model)
    ranks = engine.mesh.size("world")
    model.layers[0].requires_grad_(engine.mesh.rank() == 0)
    engine.backward(engine(data()))
    if ranks > 1:
        with pytest.raises(RankError, match=r"`layers.0.*: must be trained on every rank or on none"):
            engine.step()
    engine.destroy()
    return []


# --- zero_grad, and users who touch param.grad --------------------------------------------------------


def a_gradient_that_was_set_by_hand_is_added(stage: int) -> Any:
    """Before the step and between micro-batches, in the dtype of the accumulator."""
    engine, plain = pair(Net(), stage, 2)
    for micro in range(2):
        engine.backward(engine(data(micro)))
        plain(data(micro)).backward()
        for model in (engine.module, plain):
            parameter = model.get_parameter("layers.2.dense.bias")
            extra = torch.full((WIDTH,), 0.5)
            parameter.grad = extra if parameter.grad is None else parameter.grad + extra
    wrong = [name for name in differs(engine, plain, 0.5) if not _close(engine, plain, name, 0.5)]
    left = left_behind(engine)
    engine.step()
    engine.destroy()
    return wrong + left


def set_by_hand_on_one_rank(stage: int, before: bool) -> str:
    """After the backward, or with none at all, on rank 1 alone: what every rank is told, and soon."""
    engine, _ = pair(Net(), stage, 1)
    if before:
        engine.backward(engine(data()))
    parameter = engine.module.get_parameter("layers.2.dense.bias")
    if engine.mesh.rank() == 1:
        parameter.grad = torch.ones(WIDTH)
    said = ""
    try:
        engine.step()
    except RankError as error:
        said = str(error)
    engine.zero_grad()
    parameter.grad = torch.ones(WIDTH)
    updated = engine.step().updated
    engine.destroy()
    return said if updated else "the next step did not update"


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_was_set_on_one_rank_is_told_on_all(stage: int, before: bool) -> None:
    for said in run_ranks(set_by_hand_on_one_rank, 2, stage, before, timeout=20.0):
        assert "must be set on every rank or on none" in said
        assert "`layers.2.dense.bias` on some ranks only" in said


def clearing_inside_a_hook_loses_only_that(stage: int) -> Any:
    """A user's hook that takes the gradient away, as for an optimizer of its own in the backward."""
    engine, plain = pair(Net(), stage, 1)
    for model in (engine.module, plain):
        parameter = model.get_parameter("layers.1.dense.weight")
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    engine.backward(engine(data()))
    plain(data()).backward()
    wrong = differs(engine, plain)
    engine.destroy()
    return wrong


def a_late_gradient_reaches_the_same_accumulator(stage: int) -> Any:
    """Weight gradients that are written after the backward, as a split backward does."""
    engine, plain = pair(Net(), stage, 2)
    plain(data()).backward()
    engine.backward(engine(data()))
    late = plain.get_parameter("layers.0.dense.weight").grad
    assert late is not None
    engine.module.layers[0].dense.weight.grad = late.clone()
    late.mul_(2.0)
    engine.backward(engine(data()))
    for parameter in plain.parameters():
        if parameter.grad is not None and parameter.grad is not late:
            parameter.grad.mul_(2.0)
    extra = plain.get_parameter("layers.0.dense.weight").grad
    extra.mul_(1.5)
    wrong = differs(engine, plain, 0.5)
    wrong = [name for name in wrong if not _close(engine, plain, name, 0.5)]
    engine.destroy()
    return wrong


CHECKS = [
    a_unit_unused_on_one_rank,
    units_of_experts,
    first_used_in_the_last_micro_batch,
    freezing_on_some_ranks_is_an_error,
    a_gradient_that_was_set_by_hand_is_added,
    clearing_inside_a_hook_loses_only_that,
    a_late_gradient_reaches_the_same_accumulator,
]


@pytest.mark.parametrize(("world", "stage"), CELLS)
def test_traps_of_gradients(world: int, stage: int) -> None:
    for found in run_ranks(run_all, world, CHECKS, stage):
        assert found == []
