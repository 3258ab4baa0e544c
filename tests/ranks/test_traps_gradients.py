"""Gradients that are late, absent on some ranks, or missing, and parameters of odd kinds."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks.harness import on_ranks
from tests.ranks.plain import differs, differs_more, left_behind, on_every_cell, pair
from zerodrift.errors import RankError

WIDTH = 8


class Routed(nn.Module):
    """A block that calls its expert on request."""

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


def by_rank(calls: list[dict[str, Any]], stage: int, **rest: Any) -> list[str]:
    """Make another call on every rank; the plain model makes all of them, and halves the sum."""
    engine, plain = pair(Net(), stage, **rest)
    ranks = engine.mesh.size("data")
    engine.backward(engine(data(), **calls[engine.mesh.rank() % len(calls)]))
    for call in calls[:ranks]:
        plain(data(), **call).backward()
    wrong = differs(engine, plain, 1.0 / ranks)
    engine.step()
    engine.destroy()
    return wrong


def units_of_experts(stage: int) -> Any:
    """Train experts as units inside a block's: rank 0 sends tokens to one, rank 1 to another."""
    found = []
    for calls in ([{"chosen": (0,)}, {"chosen": (1,)}], [{"chosen": (0, 1)}, {"chosen": (1,)}]):
        for recompute in (False, True):
            each = [{**call, "recompute": recompute} for call in calls]
            found += by_rank(each, stage, sharding={"units": ["layers.*", "layers.*.experts.*"]})
    return found


def first_used_in_the_last_micro_batch(stage: int) -> Any:
    engine, plain = pair(Net(), stage, 3)
    for micro, call in enumerate([{"chosen": ()}, {"skip": (0, 1)}, {"chosen": (1,)}]):
        engine.backward(engine(data(micro), **call))
        plain(data(micro), **call).backward()
    # The mean over three is not exact: autograd's sums agree to the last bit, the division may not.
    wrong = differs_more(engine, plain, 1 / 3, 1e-6, 0.0)
    engine.destroy()
    return wrong


# --- frozen on some ranks ---------------------------------------------------------------------------


def freezing_on_some_ranks_is_an_error(stage: int) -> None:
    engine, _ = pair(Net(), stage)
    engine.module.layers[0].requires_grad_(engine.mesh.rank() == 0)
    engine.backward(engine(data()))
    if engine.mesh.size("world") > 1:
        with pytest.raises(RankError, match=r"`layers.0.*: must be trained on every rank or on none"):
            engine.step()
    engine.destroy()


# --- zero_grad, and users who touch param.grad --------------------------------------------------------


def set_on_one_rank(stage: int) -> Any:
    """Set a gradient on rank 1 alone, after a backward or without one: an error on every rank, and soon."""
    engine, _ = pair(Net(), stage, 1)
    parameter = engine.module.get_parameter("layers.2.dense.bias")
    wrong = []
    for before in (True, False):
        if before:
            engine.backward(engine(data()))
        if engine.mesh.rank() == 1:
            parameter.grad = torch.ones(WIDTH)
        begun = time.monotonic()
        with pytest.raises(RankError, match="must be set on every rank or on none") as caught:
            engine.step()
        if "`layers.2.dense.bias` on some ranks only" not in str(caught.value):
            wrong.append(str(caught.value))
        if time.monotonic() - begun > 20.0:
            wrong.append("not soon")
        engine.zero_grad()
        parameter.grad = torch.ones(WIDTH)
        if not engine.step().updated:
            wrong.append("the next step did not update")
    engine.destroy()
    return wrong


@on_ranks(2)
def test_a_gradient_that_was_set_on_one_rank_is_told_on_all() -> list[str]:
    return [f"stage {stage}: {wrong}" for stage in range(4) for wrong in set_on_one_rank(stage)]


def clearing_inside_a_hook_loses_only_that(stage: int) -> Any:
    """Remove a gradient in a user's hook, as for an optimizer of its own in the backward."""
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
    """Write weight gradients between micro-batches, as a split backward does."""
    engine, plain = pair(Net(), stage, 2)
    plain(data()).backward()
    engine.backward(engine(data()))
    name = "layers.0.dense.weight"
    late = plain.get_parameter(name).grad
    assert late is not None
    engine.module.get_parameter(name).grad = late.clone()
    engine.backward(engine(data()))
    for key, parameter in plain.named_parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(3.0 if key == name else 2.0)
    wrong = differs_more(engine, plain, 0.5, 1e-6, 0.0) + left_behind(engine)
    engine.step()
    engine.destroy()
    return wrong


test_traps_of_gradients = on_every_cell(
    [
        units_of_experts,
        first_used_in_the_last_micro_batch,
        freezing_on_some_ranks_is_an_error,
        clearing_inside_a_hook_loses_only_that,
        a_late_gradient_reaches_the_same_accumulator,
    ]
)
