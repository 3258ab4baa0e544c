"""Habits with autograd: several losses, penalties, checkpointing, custom functions.

Invariant: only a backward that reaches the gradients of parameters counts as one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.habits.loop import Habit, Loop, Trainer, each, habits_of
from tests.habits.networks import (
    ORDER,
    WIDTH,
    Block,
    Net,
    as_loss_of,
    block_of,
    fit,
    fitted,
    net_of,
    raises,
    square,
    step_on,
)

Smooth = block_of(lambda self, x: x + self.down(torch.tanh(self.up(x))))
"""A block with an activation whose second derivative is exact."""

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
    "torch_autograd_backward": lambda one, two: torch.autograd.backward([square(one), square(two)]),
    # Of an output that is no scalar.
    "a_gradient_that_is_given": lambda one, two: one.backward(gradient=torch.full_like(one, 0.5)),
}


def a_sum_over_micro_batches(loop: Loop) -> None:
    """Run one backward of several forwards."""
    net = loop.train(Net())
    three = [[loop.data(3 * step + number) for number in range(3)] for step in range(2)]
    step_on(net, (sum(square(net(x)) for x in data) / 3 for data in three))


@as_loss_of(Net)
def two_views_of_one_batch(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Return a contrastive loss of two forwards."""
    one, two = net(x + 0.1), net(x - 0.1)
    logits = F.normalize(one.float(), dim=-1) @ F.normalize(two.float(), dim=-1).T
    return F.cross_entropy(logits, torch.arange(4))


@as_loss_of(Net, 3)
def a_target_of_ones_own_without_gradients(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Run the second forward without gradients, as BYOL and self-distillation do."""
    with torch.no_grad():
        target = net(x + 0.1)
    return square(net(x) - target)


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


def the_model_is_called_in_pieces(loop: Loop) -> None:
    """Take the loss of a part of the output, so that the head gets no gradient."""

    class Hidden(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.into(x)
            states = [h := block(h) for block in self.blocks]
            return {"out": self.head(h), "states": torch.stack(states)}

    net = loop.train(Hidden())
    fit(loop, net, lambda x: square(net(x)["states"][0]))
    fit(loop, net, lambda x: square(net(x)["states"][2]) + square(net(x)["out"]), seed=2)


# --- gradients of other things --------------------------------------------------------------------------


@as_loss_of(Net, micro=2)
def saliency(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Take the gradient of the input, between two micro-batches of a step."""
    x.requires_grad_()
    out = net(x)
    (found,) = torch.autograd.grad(out.float().sum(), x, retain_graph=True)
    loop.see("saliency", found)
    return square(out)


@as_loss_of(Net)
def adversarial_examples_by_backward(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Train on PGD examples by `x.grad`, and drop the model's gradients."""
    square(net(x.requires_grad_())).backward()
    loop.see("x.grad", x.grad)
    net.zero_grad()
    return square(net((x + 0.1 * x.grad.sign()).detach()))


def free_adversarial_training(loop: Loop) -> None:
    """Give a leaf that is no parameter its gradient in the same backward."""
    net = loop.train(Net())
    noise = torch.zeros(4, WIDTH, dtype=loop.dtype, requires_grad=True)
    for number in range(3):
        net.backward(square(net(loop.data(number) + noise)))
        with torch.no_grad():
            noise += 0.1 * noise.grad.sign()
        noise.grad = None
        net.step()
    loop.see("noise", noise)


@as_loss_of(lambda: Net(out=1))
def a_gradient_penalty(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Add the penalty of WGAN-GP: a gradient of a gradient."""
    out = net(x.requires_grad_())
    (found,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
    return square(out) + (found.float().norm(dim=1) - 1).square().mean()


@as_loss_of(lambda: Net(out=1))
def a_penalty_on_its_own(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Train on the penalty R1: only the gradient's norm is in the loss."""
    x.requires_grad_()
    (found,) = torch.autograd.grad(net(x).float().sum(), x, create_graph=True)
    return square(found)


def forces(loop: Loop) -> None:
    """Differentiate an energy by position inside the model's own forward, as in molecular dynamics."""

    class Energy(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                x = x.requires_grad_()
                energy = super().forward(x).float().sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
            return energy, force

    net = loop.train(Energy(Smooth))

    def loss(x: Tensor) -> Tensor:
        energy, force = net(x)
        return 0.01 * energy.square() + square(force)

    fit(loop, net, loss)
    net.module.eval()
    with torch.no_grad():
        loop.see("energy", [value.detach() for value in net(loop.data(7))])


def a_gradient_of_parameters(loop: Loop) -> None:
    """Call `torch.autograd.grad` by a parameter, which at stage 3 exists only inside of its unit."""
    net = loop.train(Net())
    out = net(loop.data(0))
    weight = net.module.blocks[1].up.weight
    (found,) = torch.autograd.grad(square(out), weight, retain_graph=True)
    loop.see("gradient", found)
    net.backward(square(out))
    loop.see("updated", net.step())


def a_graph_of_a_backward(loop: Loop) -> None:
    """Call `loss.backward(create_graph=True)` without taking the second derivative."""
    net = loop.train(Net(Smooth))
    for number in range(2):
        net.backward(square(net(loop.data(number))), create_graph=True)
        net.step()


def backward_by_inputs(loop: Loop) -> None:
    """Call `loss.backward(inputs=[...])` for a gradient of the input alone."""
    net = loop.train(Net())
    x = loop.data(0).requires_grad_()
    out = net(x)
    square(out).backward(inputs=[x], retain_graph=True)
    loop.see("x.grad", x.grad)
    net.backward(square(out))
    loop.see("updated", net.step())


# --- torch.func -----------------------------------------------------------------------------------------


class DerivativeInsideTheModel(Net):
    """A model with `torch.func.grad` of blocks by their input: a physics-informed network."""

    def forward(self, x: Tensor) -> Tensor:
        def energy(one: Tensor) -> Tensor:
            return Net.forward(self, one).float().square().sum()

        return torch.func.vmap(torch.func.grad(energy))(x)


def a_jacobian_of_the_model(loop: Loop) -> None:
    """Call `torch.func.jvp` around the model, without gradients of parameters."""
    net = loop.train(Net(Smooth))
    x = loop.data(0)
    out, tangent = torch.func.jvp(lambda one: net(one), (x,), (torch.ones_like(x),))
    loop.see("jvp", [out, tangent])
    fit(loop, net)


@as_loss_of(Net)
def other_weights_for_a_call(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Call `functional_call` with the user's own weights, as in meta-learning."""
    with net.gathered() as full:
        fast = {name: value.detach().clone().requires_grad_() for name, value in full.items()}
    inner = square(torch.func.functional_call(net.module, fast, (x,)))
    grads = torch.autograd.grad(inner, list(fast.values()))
    loop.see("inner", [inner, grads[0]])
    return square(net(x))


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


class WeightOutsideUnderCheckpointing(Recomputed):
    """A model that uses a block's weight in a function that is recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return checkpoint(lambda h: F.linear(h, self.blocks[0].up.weight).tanh(), h, use_reentrant=False)


@as_loss_of(Net)
def a_checkpoint_around_the_call(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Call `checkpoint(net, x)`, as GradCache does."""
    return square(checkpoint(net, x, use_reentrant=False))


@as_loss_of(Net)
def a_reentrant_checkpoint_around_the_call(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    return square(checkpoint(net, x.requires_grad_(), use_reentrant=True))


def a_checkpointed_block_with_a_list(loop: Loop) -> None:
    """Append in a recomputed block, which appends twice in plain torch, too."""

    class Appends(Block):
        def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
            found.append(x.detach())
            return super().forward(x)

    net = loop.train(Recomputed(False, Appends))
    found: list[Tensor] = []
    net.backward(square(net(loop.data(0), found)))
    loop.see("found", found)
    net.step()


# --- functions and hooks of autograd --------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """A rounding with a straight-through gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Linear(torch.autograd.Function):
    """A hand-written matrix product, which saves the weight and computes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


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


@as_loss_of(Net)
def activations_on_the_host(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Use `save_on_cpu` around the forward."""
    with torch.autograd.graph.save_on_cpu():
        return square(net(x))


@as_loss_of(Net)
def hooks_on_what_is_saved(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Pack saved tensors by the user's own hooks: as copies, in another dtype."""
    packed = []

    def pack(tensor: Tensor) -> Any:
        packed.append(tensor.numel())
        return tensor.dtype, tensor.double() if tensor.is_floating_point() else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held[1].to(held[0])):
        found = square(net(x))
    loop.see("packed", len(packed) > 0)
    return found


def a_tensor_that_was_changed(loop: Loop) -> None:
    """Change a saved tensor in place: an error, as in plain torch."""
    net = loop.train(Net())
    out = net(loop.data(0)).exp()
    loss = square(out)
    out.data.mul_(1.0)
    with torch.no_grad():
        out.mul_(2.0)
    raises(loop, "backward", lambda: net.backward(loss))
    net.zero_grad()
    fit(loop, net)


def a_second_backward_of_a_freed_graph(loop: Loop) -> None:
    """Run a second backward of a freed graph, an error as in plain torch, and train on."""
    net = loop.train(Net())
    loss = square(net(loop.data(0)))
    net.backward(loss)
    net.step()
    raises(loop, "backward", lambda: net.backward(loss))
    net.zero_grad()
    fit(loop, net)


class Adds(Block):
    def forward(self, x: Tensor) -> None:
        x.add_(self.down(F.gelu(self.up(x.clone()))))


class ChangesItsInput(Net):
    """A model whose blocks add in place to a residual stream and return nothing."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        block(x)
        return x


def a_block_that_changes_and_returns_its_input(loop: Loop) -> None:
    """Run blocks with `x += ...; return x`, and with a view of the input."""

    class Adds(Block):
        def forward(self, x: Tensor) -> Tensor:
            x += self.down(F.gelu(self.up(x.clone())))
            return x

    class Half(Block):
        def forward(self, x: Tensor) -> Tensor:
            half = x[:, : WIDTH // 2]
            half.mul_(0.5)
            return x + self.down(F.gelu(self.up(x)))

    fit(loop, loop.train(Net(Adds)))
    fit(loop, loop.train(Net(Half)))


class FillsRow(Block):
    def forward(self, x: Tensor, row: Tensor) -> None:
        row.copy_(super().forward(x))


class FilledByRows(Net):
    """A model whose blocks each write a slice of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        rows = h.new_empty(len(x), 3, WIDTH)
        for number, block in enumerate(self.blocks):
            block(h, rows[:, number])
        return self.head(rows)


def a_loss_in_double(loop: Loop) -> None:
    """Compute the loss in fp64 and scale by a tensor that is no leaf of the model."""
    net = loop.train(Net())
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    fit(loop, net, lambda x: net(x).double().square().mean() * weight)
    loop.see("weight", weight.grad)


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
    "a_map_over_samples": (net_of(lambda self, x: torch.func.vmap(partial(Net.forward, self))(x)), 2),
    "a_derivative_inside_the_model": (lambda: DerivativeInsideTheModel(Smooth), 2),
    "checkpointed_blocks": (lambda: Recomputed(False, DROPS), 3),
    "reentrantly_checkpointed_blocks": (lambda: Recomputed(True, DROPS), 3),
    "a_checkpointed_part_of_a_block": (lambda: Net(CheckpointedPartOfABlock), 2),
    "a_weight_outside_under_checkpointing": (lambda: WeightOutsideUnderCheckpointing(False), 2),
    "checkpoints_in_checkpoints": (
        lambda: Recomputed(
            False, block_of(lambda self, x: checkpoint(partial(Block.forward, self), x, use_reentrant=False))
        ),
        2,
    ),
    "checkpointed_segments": (
        net_of(lambda self, x: checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)),
        2,
    ),
    "functions_of_autograd": (
        lambda: Net(
            block_of(lambda self, x: x + Straight.apply(Linear.apply(x, self.up.weight)) @ self.down.weight.T)
        ),
        2,
    ),
    "weights_on_the_context": (
        lambda: Net(
            block_of(lambda self, x: Attribute.apply(Attribute.apply(x, self.up.weight), self.down.weight))
        ),
        2,
    ),
    "a_block_that_changes_its_input": (lambda: ChangesItsInput(Adds), 2),
    "a_buffer_that_blocks_fill_and_return_nothing": (lambda: FilledByRows(FillsRow), 3),
    "no_grad_around_a_part": (lambda: NoGradAroundAPart(), 2),
}
"""Name of the habit -> (its model, the steps that it is trained)."""


HABITS = habits_of(
    globals(),
    *each(by_hand, BY_HAND),
    *each(fitted, FITTED),
    Habit(a_backward_for_each_loss, close=ORDER, why="stage 3 reduces after every backward"),
)
