"""Small networks for habits: an embedding, three blocks, a head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.habits.loop import Loop, Trainer

WIDTH = 8


class Block(nn.Module):
    """A residual block of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Parts(nn.Module):
    """A module of given parts, whose forward is a function."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward_of = forward

    def forward(self, *args: Any) -> Any:
        return self._forward_of(self, *args)


class Net(nn.Module):
    """Blocks between two matrices."""

    def __init__(self, block: Callable[[], nn.Module] = Block, out: int = WIDTH, blocks: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, out)

    def through(self, block: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        return block(x, *rest)

    def chosen(self) -> Iterable[nn.Module]:
        return self.blocks

    def trunk(self, x: Tensor, *rest: Any) -> Tensor:
        h = self.into(x)
        for block in self.chosen():
            h = self.through(block, h, *rest)
        return h

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.head(self.trunk(x, *rest))


def net_of(forward: Callable[..., Any]) -> Callable[..., Net]:
    """Return a class of networks with another forward."""
    return type("NetOf", (Net,), {"forward": forward})


def block_of(forward: Callable[..., Any]) -> Callable[[], Block]:
    """Return a class of blocks with another forward."""
    return type("BlockOf", (Block,), {"forward": forward})


class Seeded(Net):
    """A network that begins with the same values wherever it is made."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        torch.manual_seed(7)
        super().__init__(block)


def square(out: Tensor) -> Tensor:
    """Return a loss of any tensor."""
    return out.float().square().mean()


ORDER = 2.0**-20
"""Tolerance of fp32 sums in another order: some ulps of 2^-23."""


def step_on(net: Trainer, losses: Iterable[Tensor]) -> None:
    """Run a step for each loss; a generator of losses calls the model only after the step before."""
    for loss in losses:
        net.backward(loss)
        net.step()


def fit(
    loop: Loop, net: Trainer, loss_of: Callable[[Tensor], Tensor] | None = None, steps: int = 2, seed: int = 0
) -> None:
    """Train some steps on the loop's data."""
    batches = map(loop.data, range(seed, seed + steps))
    step_on(net, (loss_of(x) if loss_of else square(net(x)) for x in batches))


def steps_of(loop: Loop, net: Trainer, count: int = 3) -> Iterator[int]:
    """Fit step by step, and yield after each step."""
    for number in range(count):
        fit(loop, net, steps=1, seed=number)
        yield number


def as_loss_of(model: Callable[[], nn.Module], steps: int = 2, micro: int = 1) -> Any:
    """Make a habit of a loss of (loop, net, data), with which the model is trained."""

    def habit_of(loss: Callable[[Loop, Trainer, Tensor], Tensor]) -> Callable[[Loop], None]:
        def run(loop: Loop) -> None:
            net = loop.train(model(), micro)
            for number in range(steps * micro):
                net.backward(loss(loop, net, loop.data(number)))
                loop.see("updated", net.step())

        run.__name__, run.__module__, run.__doc__ = loss.__name__, loss.__module__, loss.__doc__
        return run

    return habit_of


def fitted(loop: Loop, make: Callable[[], nn.Module]) -> None:
    """Make a model and train it: a row of a table."""
    fit(loop, loop.train(make()))


def raises(loop: Loop, name: str, call: Callable[[], Any]) -> None:
    """Record that a call raises, as in plain torch."""
    try:
        call()
    except Exception as error:
        loop.see(f"{name} raised", isinstance(error, RuntimeError | ValueError | TypeError))
    else:
        loop.see(f"{name} raised", False)
