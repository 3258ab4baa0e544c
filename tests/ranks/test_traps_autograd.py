"""Autograd over sharded parameters: saved views, versions, graphs that run twice or late."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks.plain import differs, differs_more, left_behind, on_every_cell, pair

WIDTH = 16


class Savers(nn.Module):
    """A block that saves a weight in every way: itself, transposed, a slice, in a Function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.table = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.norm(x)) * self.scale
        x = x @ self.linear.weight[:, : WIDTH // 2] @ self.linear.weight.t()[: WIDTH // 2]
        return Cube.apply(x, self.table[1:3].view(-1)[WIDTH:])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight**3, (grad * x * 3 * weight**2).sum(0)


class Stack(nn.Module):
    """Blocks that are units, which tests call in their own ways."""

    def __init__(self, layers: int = 3, block: type[nn.Module] = Savers) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(layers))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] | None = None, how: str = "") -> torch.Tensor:
        x = self.into(x)
        for number in order if order is not None else range(len(self.layers)):
            layer = self.layers[number]
            x = checkpoint(layer, x, use_reentrant=how == "reentrant") if how else layer(x)
        return x.square().mean()


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))


# --- what a forward saves -----------------------------------------------------------------------------


class Wanders(nn.Module):
    """A block with another graph in each forward: more nodes, fewer, others, and one that saves several."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 4 == 0:
            return self.linear(x) * self.other.weight[0]
        if self.calls % 4 == 1:
            return self.linear(self.norm(self.other(x)).tanh())
        if self.calls % 4 == 2:
            return Cube.apply(torch.einsum("ab,cb,db->ad", x, self.linear.weight, self.other.weight), x[0])
        return self.other(self.norm(x)) + self.linear(x).tanh()


def forwards_that_take_other_ways(stage: int) -> Any:
    """Run forwards whose saved tensors are never all where the one before had them."""
    engine, plain = pair(Stack(block=Wanders), stage)
    wrong = []
    for step in range(6):
        loss = engine(data(step))
        held = [
            segment.number
            for unit in engine.executor.units
            for segment in unit.gathering
            if unit.spec.name and segment.full.untyped_storage().nbytes()
        ]
        wrong += [f"step {step}: segments {held} hold memory after a forward"] if held else []
        engine.backward(loss)
        plain(data(step)).backward()
        wrong += [f"step {step}: {name}" for name in differs(engine, plain)]
        engine.zero_grad()
        plain.zero_grad()
    engine.destroy()
    return wrong


def checkpointing_a_shared_block_reentrantly(stage: int) -> Any:
    engine, plain = pair(Stack(), stage, 2)
    for micro in range(2):
        engine.backward(engine(data(micro), order=(0, 1, 0, 2, 0), how="reentrant"))
        plain(data(micro), order=(0, 1, 0, 2, 0)).backward()
        # Later uses come when the block has been reduced already; nothing may be left behind.
        left = left_behind(engine)
        if left:
            return f"left behind: {left}"
    # The three uses are added up in another order than autograd's: ulps, not lost parts.
    wrong = differs_more(engine, plain, 0.5, 1e-5, 1e-6)
    engine.destroy()
    return wrong


# --- versions -----------------------------------------------------------------------------------------


def a_change_in_place_between_forward_and_backward_is_caught(stage: int) -> Any:
    """Change a weight by hand, or by a step: an error, as in plain torch. Gathers must not count."""
    engine, _ = pair(Stack(), stage)

    def written_by_value() -> None:
        with engine.gathered(["layers.1.scale"], write=True) as values, torch.no_grad():
            values["layers.1.scale"].mul_(2.0)

    def written_by_parameter() -> None:
        with torch.no_grad(), engine.gathered():
            engine.module.layers[1].scale.mul_(1.0)

    def stepped() -> None:
        engine.backward(engine(data()))
        engine.step()

    problems = []
    for change in (written_by_value, written_by_parameter, stepped):
        loss = engine(data(1))
        change()
        if not is_refused(engine, loss):
            problems.append(f"{change.__name__}: was not caught")

    loss = engine(data())
    with engine.gathered():
        pass
    for unit in engine.executor.units:
        unit.gather()
        unit.release()
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return problems


def is_refused(engine: Any, loss: torch.Tensor) -> bool:
    try:
        engine.backward(loss)
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


# --- how often a graph runs -----------------------------------------------------------------------------


def two_forwards_then_two_backwards(stage: int) -> Any:
    """Run forwards whose saved views of weights, of every kind, outlive the weights' memory."""
    engine, plain = pair(Stack(), stage, 2)
    wrong = []
    for order in ((0, 1), (1, 0)):
        losses, expected = [engine(data(0)), engine(data(1))], [plain(data(0)), plain(data(1))]
        for number in order:
            engine.backward(losses[number])
            expected[number].backward()
        wrong += differs(engine, plain, 0.5)
        engine.zero_grad()
        plain.zero_grad()
    engine.destroy()
    return wrong


def no_sync_holds_the_reduction_back(stage: int) -> Any:
    engine, plain = pair(Stack(), stage, precision={"reduce": {"when": "last"}})
    with engine.comm.record() as log:
        loss = engine(data())
        with engine.no_sync():
            loss.backward()
    plain(data()).backward()
    early = [entry for entry in log if entry.op == "reduce_scatter"]
    wrong = differs(engine, plain)
    engine.destroy()
    return wrong or early


test_traps_of_autograd = on_every_cell(
    [
        forwards_that_take_other_ways,
        checkpointing_a_shared_block_reentrantly,
        a_change_in_place_between_forward_and_backward_is_caught,
        two_forwards_then_two_backwards,
        no_sync_holds_the_reduction_back,
    ]
)
