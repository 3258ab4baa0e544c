"""Units that run in another order, or on some ranks only, have the gradients of a plain loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks
from zerodrift.engine.step.traversal import sort_by_pairs

WIDTH, STEPS, MICRO, RANKS = 8, 3, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, keep: bool = True) -> torch.Tensor:
        made = x + torch.tanh(self.linear(self.norm(x if other is None else x + other)))
        return made if keep else x


class Net(nn.Module):
    """A model with blocks in three lists, which `run` calls in its own order."""

    def __init__(self, run: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.ModuleList(Block() for _ in range(2))
        self.middle = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.seed = ""
        self._run = run

    def kept(self, blocks: nn.ModuleList) -> Iterator[nn.Module]:
        """Yield half of the blocks, at random."""
        draw = random.Random(f"{self.seed}, {len(blocks)}, {blocks is self.first}")
        return (block for block in blocks if draw.random() < 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self._run(self, x)).square().mean()


def through(blocks: Iterator[nn.Module], x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x, *more)
    return x


def in_a_row(net: Net, x: torch.Tensor) -> torch.Tensor:
    for blocks in (net.first, net.middle, net.last):
        x = through(net.kept(blocks), x)
    return x


def decoder_first(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Run an encoder whose decoder is defined before it, and uses its output everywhere."""
    return through(net.kept(net.first), x, through(net.kept(net.middle), x))


def towers(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Run towers without a graph behind their input."""
    return sum((through(net.kept(each), x) for each in (net.middle, net.last, net.first)), x)


def recomputed(net: Net, x: torch.Tensor, reentrant: bool = False) -> torch.Tensor:
    for blocks in (net.first, net.middle, net.last):
        for block in net.kept(blocks):
            x = checkpoint(block, x.requires_grad_(), use_reentrant=reentrant)
    return x


def recomputed_inside(net: Net, x: torch.Tensor) -> torch.Tensor:
    return recomputed(net, x, reentrant=True)


def put_aside(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Run all blocks on all ranks, some of which return their input."""
    x = net.first[0](x)
    for blocks in (net.middle, net.last):
        kept = set(net.kept(blocks))
        for block in blocks:
            x = block(x, keep=block in kept)
    return x


NETS = (in_a_row, decoder_first, towers, recomputed, recomputed_inside, put_aside)


def data(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, WIDTH, generator=generator)


def plain(run: Callable[[Net, torch.Tensor], torch.Tensor]) -> list[float]:
    net = Net(run)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            for rank in range(RANKS):
                net.seed = f"{step}, {micro}, {rank}"
                (net(data(step, micro, rank)) / (MICRO * RANKS)).backward()
        squares = [value.grad.double().square().sum() for value in net.parameters() if value.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        optimizer.step()
    return norms


def train_net() -> list[list[float | None]]:
    sgd = {"type": "SGD", "params": {"lr": 0.01}}
    found = []
    for run in NETS:
        net = Net(run)
        engine = make(config(3, "fp32", MICRO, optimizer=sgd, gradient_clipping=0.0), net)
        norms = []
        for step in range(STEPS):
            for micro in range(MICRO):
                net.seed = f"{step}, {micro}, {engine.mesh.rank()}"
                engine.backward(engine(data(step, micro, engine.mesh.rank())))
                result = engine.step()
            norms.append(result.grad_norm)
        found.append(norms)
        engine.destroy()
    return found


def test_units_that_some_ranks_drop_may_run_in_any_order() -> None:
    for norms in run_ranks(train_net, RANKS):
        for run, seen in zip(NETS, norms, strict=True):
            assert seen == pytest.approx(plain(run), rel=1e-5), run.__name__


def test_an_order_keeps_what_it_may_and_is_none_where_there_is_none() -> None:
    assert sort_by_pairs([3, 1, 2], []) == [3, 1, 2]
    assert sort_by_pairs([0, 1, 2, 3], [(2, 0), (3, 2)]) == [1, 3, 2, 0]
    assert sort_by_pairs([0, 1, 2], [(0, 1), (1, 2), (2, 0)]) is None
