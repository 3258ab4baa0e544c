"""Habits with autograd: several losses, penalties, checkpointing, custom functions.

Invariant: only a backward that reaches the gradients of parameters counts as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.habits.loop import Habit, Loop, Trainer, each, habits_of
from tests.habits.networks import ORDER, WIDTH, Block, Net, as_loss_of, block_of, fitted, square

# --- several losses, several backwards ------------------------------------------------------------------


class TwoHeads(Net):
    """A model of two tasks on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.head(h), self.other(h)


def a_backward_for_each_loss(loop: Loop) -> None:
    """Run a backward for each of two losses of one forward, the first with retain_graph."""
    net = loop.train(TwoHeads(), 2)
    for number in range(2):
        one, two = net(loop.data(number))
        net.backward(square(one), retain_graph=True)
        net.backward(square(two))
        if loop.plain:
            net.step()
        net.step()


def by_hand(loop: Loop, backward: Callable[[Tensor, Tensor], None]) -> None:
    """Call autograd instead of the engine's own backward."""
    net = loop.train(TwoHeads())
    for number in range(2):
        backward(*net(loop.data(number)))
        net.step()


BY_HAND: dict[str, Any] = {
    "losses_by_hand": lambda one, two: (square(one) + square(two)).backward(),
    "a_gradient_that_is_given": lambda one, two: one.backward(gradient=torch.full_like(one, 0.5)),
}


@as_loss_of(Net)
def two_views_of_one_batch(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Return a contrastive loss of two forwards."""
    one, two = net(x + 0.1), net(x - 0.1)
    logits = F.normalize(one.float(), dim=-1) @ F.normalize(two.float(), dim=-1).T
    return F.cross_entropy(logits, torch.arange(4))


@as_loss_of(Net)
def a_forward_that_is_thrown_away(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Run a forward with gradients on but without a backward, to look at a sample."""
    loop.see("looked at", net(x + 1.0))
    return square(net(x))


@as_loss_of(Net)
def a_forward_between_forward_and_backward(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Evaluate without gradients between forward and backward."""
    out = net(x)
    with torch.inference_mode():
        loop.see("evaluated", net(loop.data(5)).clone())
    return square(out)


def two_forwards_and_two_backwards(loop: Loop) -> None:
    """Run backwards in either order, after forwards whose saved views outlive the weights' memory."""
    net = loop.train(Net(SavesWeights), 2)
    for order in ((0, 1), (1, 0)):
        losses = [square(net(loop.data(number))) for number in range(2)]
        for number in order:
            net.backward(losses[number])
            net.step()


# --- gradients of other things --------------------------------------------------------------------------


@as_loss_of(Net, micro=2)
def saliency(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Take the gradient of the input, between two micro-batches of a step."""
    x.requires_grad_()
    out = net(x)
    (found,) = torch.autograd.grad(out.float().sum(), x, retain_graph=True)
    loop.see("saliency", found)
    return square(out)


@as_loss_of(lambda: Net(out=1))
def a_gradient_penalty(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Add the penalty of WGAN-GP: a gradient of a gradient."""
    out = net(x.requires_grad_())
    (found,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
    return square(out) + (found.float().norm(dim=1) - 1).square().mean()


def a_gradient_of_parameters(loop: Loop) -> None:
    """Call `torch.autograd.grad` by a parameter, which at stage 3 exists only inside of its unit."""
    net = loop.train(Net())
    out = net(loop.data(0))
    weight = net.module.blocks[1].up.weight
    (found,) = torch.autograd.grad(square(out), weight, retain_graph=True)
    loop.see("gradient", found)
    net.backward(square(out))
    loop.see("updated", net.step())


# --- checkpointing --------------------------------------------------------------------------------------


class Recomputed(Net):
    """A model that recomputes its blocks in the backward."""

    def __init__(self, reentrant: bool, block: Any = Block) -> None:
        super().__init__(block)
        self.reentrant = reentrant

    def through(self, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        return checkpoint(block, x, *rest, use_reentrant=self.reentrant)


class CheckpointedPartOfABlock(Block):
    """A block that recomputes a part of itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: F.gelu(self.up(y)), x, use_reentrant=False)
        return x + checkpoint(self.down, h, use_reentrant=False)


@as_loss_of(Net)
def a_checkpoint_around_the_call(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Call `checkpoint(net, x)`, as GradCache does."""
    return square(checkpoint(net, x, use_reentrant=False))


@as_loss_of(Net)
def a_reentrant_checkpoint_around_the_call(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    return square(checkpoint(net, x.requires_grad_(), use_reentrant=True))


# --- functions and hooks of autograd --------------------------------------------------------------------


class Cube(torch.autograd.Function):
    """A function that saves a view of a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight**3, (grad * x * 3 * weight**2).sum(0)


class SavesWeights(nn.Module):
    """A block that saves weights in every way: whole, transposed, a slice, in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.scale, self.table = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.norm(x)) * self.scale
        x = x @ self.linear.weight[:, : WIDTH // 2] @ self.linear.weight.t()[: WIDTH // 2]
        return Cube.apply(x, self.table[1:3].view(-1)[WIDTH:])


class Attribute(torch.autograd.Function):
    """A product that keeps the weight as an attribute, as hand-written kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x.detach(), weight.detach()
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight, grad.T @ ctx.x


KeepsWeights = block_of(lambda self, x: Attribute.apply(Attribute.apply(x, self.up.weight), self.down.weight))


@as_loss_of(Net)
def activations_on_the_host(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Use `save_on_cpu` around the forward."""
    with torch.autograd.graph.save_on_cpu():
        return square(net(x))


class Adds(Block):
    def forward(self, x: Tensor) -> None:
        x.add_(self.down(F.gelu(self.up(x.clone()))))


class ChangesItsInput(Net):
    """A model whose blocks add in place to a residual stream and return nothing."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        block(x)
        return x


class NoGradAroundAPart(Net):
    """A model whose first blocks run without gradients, with one that detaches."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.blocks[0](self.into(x))
        h = self.blocks[1](h)
        return self.head(self.blocks[2](h)) + self.blocks[2](h.detach())


DROPS = block_of(lambda self, x: Block.forward(self, F.dropout(x, 0.3, self.training)))
"""A block whose random numbers are the same when it is recomputed."""

FITTED: dict[str, Any] = {
    "checkpointed_blocks": lambda: Recomputed(False, DROPS),
    "reentrantly_checkpointed_blocks": lambda: Recomputed(True, DROPS),
    "a_checkpointed_part_of_a_block": lambda: Net(CheckpointedPartOfABlock),
    "weights_on_the_context": lambda: Net(KeepsWeights),
    "a_block_that_changes_its_input": lambda: ChangesItsInput(Adds),
    "a_block_that_changes_and_returns_its_input": lambda: Net(
        block_of(lambda self, x: x.add_(self.down(F.gelu(self.up(x.clone())))))
    ),
    "no_grad_around_a_part": NoGradAroundAPart,
}
"""Name of the habit -> its model."""


HABITS = habits_of(
    globals(),
    *each(by_hand, BY_HAND),
    *each(fitted, FITTED),
    Habit(a_backward_for_each_loss, close=ORDER, why="stage 3 reduces after every backward"),
)
