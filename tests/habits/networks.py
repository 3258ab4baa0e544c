"""The small network that most habits train: an embedding, three blocks, a head."""

from __future__ import annotations

from collections.abc import Callable
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


class Net(nn.Module):
    """Blocks between two matrices."""

    def __init__(self, block: Callable[[], nn.Module] = Block, out: int = WIDTH, blocks: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, out)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        h = self.into(x)
        for block in self.blocks:
            h = block(h, *rest)
        return self.head(h)


def square(out: Tensor) -> Tensor:
    """A loss of any tensor."""
    return out.float().square().mean()


def fit(
    loop: Loop, net: Trainer, loss_of: Callable[[Tensor], Tensor] | None = None, steps: int = 2, seed: int = 0
) -> None:
    """Some steps of training on the loop's data."""
    for number in range(seed, seed + steps):
        x = loop.data(number)
        net.backward(loss_of(x) if loss_of else square(net(x)))
        net.step()


def fitted(loop: Loop, case: tuple[Callable[[], nn.Module], int]) -> None:
    """A model that is made and trained for some steps: a row of a table."""
    make, steps = case
    fit(loop, loop.train(make()), steps=steps)


def trained(loop: Loop, model: nn.Module, steps: int = 2) -> Trainer:
    """A model that is called with a tensor and returns one, trained for some steps."""
    net = loop.train(model)
    fit(loop, net, steps=steps)
    return net


def raised(loop: Loop, name: str, call: Callable[[], Any]) -> None:
    """See that a call raises, as it does in plain torch."""
    try:
        call()
    except Exception as error:
        loop.see(f"{name} raised", isinstance(error, RuntimeError | ValueError | TypeError))
    else:
        loop.see(f"{name} raised", False)


def finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
