"""Habits with hooks on modules, tensors and parameters after the engine was made.

Invariant: a hook sees whole weights and the values of plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.loop import Loop, each, habits_of
from tests.habits.networks import WIDTH, Net, fit, square


def features_of_a_block(loop: Loop) -> None:
    """Put a hook on the block itself, and one on its input."""
    net = loop.train(Net())
    caught: list[Tensor] = []
    net.module.blocks[0].register_forward_hook(lambda module, args, out: caught.append(out))
    net.module.blocks[2].register_forward_pre_hook(lambda module, args: caught.append(args[0]))

    def loss(x: Tensor) -> Tensor:
        caught.clear()
        net(x)
        return square(caught[0]) + square(caught[1])

    fit(loop, net, loss)


def with_hooks(put: Callable[[nn.Module, list[Any]], None]) -> Callable[[Loop], None]:
    """Make a habit of a function that puts hooks on a model, which may append to what is seen."""

    def run(loop: Loop) -> None:
        net, seen = loop.train(Net()), list[Any]()
        put(net.module, seen)
        fit(loop, net)
        loop.see("seen", seen)

    run.__name__, run.__module__, run.__doc__ = put.__name__, put.__module__, put.__doc__
    return run


def hooks_that_read_weights(loop: Loop, put: Callable[[nn.Module, Callable[..., None]], Any]) -> None:
    """Read a block's weights before it runs, after it has run, and in its backward; they are whole."""
    net = loop.train(Net())

    def look(module: nn.Module, *called: Any) -> None:
        loop.see("weight", [module.up.weight, module.down.bias])

    for block in net.module.blocks:
        put(block, look)
    net.module.into.register_forward_hook(lambda module, args, out: loop.see("into", module.weight))
    fit(loop, net)


READERS: dict[str, Any] = {
    "a_hook_that_reads_weights": lambda block, look: block.register_forward_pre_hook(look),
    "a_backward_hook_that_reads_weights": lambda block, look: block.register_full_backward_pre_hook(look),
}


def hooks_of_a_block_that_runs_alone(loop: Loop) -> None:
    """Read a block's weight after it has run by itself; then before, and the head's before the model runs."""
    net = loop.train(Net())
    block = net.module.blocks[1]

    def look(module: nn.Module, *called: Any) -> None:
        loop.see("weight", module.up.weight)

    block.register_forward_hook(look)
    loop.see("alone", block(loop.data(0)))
    block.register_forward_pre_hook(look, prepend=True)
    read_head = lambda module, args: loop.see("head", module.head.weight)  # noqa: E731
    net.module.register_forward_pre_hook(read_head, prepend=True)
    fit(loop, net)
    loop.see("alone", block(loop.data(1)))


@with_hooks
def a_hook_that_changes_input_and_output(module: nn.Module, seen: list[Any]) -> None:
    """Patch activations: the results of a hook replace input and output."""
    module.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    module.blocks[1].register_forward_hook(lambda m, args, out: out + 1.0)
    module.blocks[2].register_forward_hook(
        lambda m, args, kwargs, out: out * 0.5, with_kwargs=True, prepend=True
    )


@with_hooks
def a_backward_hook_that_changes_gradients(module: nn.Module, seen: list[Any]) -> None:
    """Reverse and scale gradients at a block's boundary."""
    module.blocks[1].register_full_backward_hook(lambda m, into, out: (-0.5 * into[0],))
    module.blocks[2].register_full_backward_pre_hook(lambda m, out: (out[0] * 2,))


def hooks_on_tensors(loop: Loop) -> None:
    """Call `register_hook` and `retain_grad` on the model's output and on inner tensors."""
    net = loop.train(Net())
    caught: list[Tensor] = []
    net.module.blocks[0].register_forward_hook(lambda module, args, out: caught.append(out))
    for number in range(2):
        out = net(loop.data(number))
        out.retain_grad()
        caught[-1].retain_grad()
        out.register_hook(lambda grad: grad * 2)
        net.backward(square(out))
        loop.see("gradients", [out.grad, caught[-1].grad])
        net.step()


@with_hooks
def hooks_on_parameters(module: nn.Module, seen: list[Any]) -> None:
    """Mask a weight's gradient."""
    mask = torch.eye(WIDTH, dtype=torch.bool)
    module.head.weight.register_hook(lambda grad: grad.masked_fill(mask.to(grad.device), 0.0))
    module.blocks[1].up.weight.register_hook(lambda grad: seen.append(grad.numel()))
    module.blocks[1].up.bias.register_hook(lambda grad: 2 * grad)


def hooks_before_the_engine(loop: Loop) -> None:
    """Put hooks on parameters before the engine is made."""
    model = Net()
    model.head.weight.register_hook(lambda grad: grad * 0.5)
    seen: list[Any] = []
    model.blocks[1].register_forward_hook(
        lambda module, args, out: seen.append(module.up.weight.sum().item())
    )
    model.blocks[1].register_full_backward_hook(lambda module, into, out: seen.append(out[0].clone()))
    net = loop.train(model)
    fit(loop, net)
    loop.see("seen", seen)


@with_hooks
def hooks_after_accumulation(module: nn.Module, seen: list[Any]) -> None:
    """Read or change accumulated gradients by `register_post_accumulate_grad_hook`."""

    def look(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        seen.append([list(parameter.grad.shape), parameter.grad.clone()])
        parameter.grad.mul_(0.5)

    module.blocks[1].down.weight.register_post_accumulate_grad_hook(look)


HABITS = habits_of(globals(), *each(hooks_that_read_weights, READERS))
