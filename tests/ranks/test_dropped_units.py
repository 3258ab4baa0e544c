"""Units that some ranks drop, and units that run in another order than they are defined in: each step has the
gradient of a plain loop. Both together is an error by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks
from zerodrift.errors import RankError

WIDTH, STEPS, MICRO, RANKS = 8, 3, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, keep: bool = True) -> torch.Tensor:
        made = x + torch.tanh(self.linear(self.norm(x if other is None else x + other)))
        return made if keep else x


class Net(nn.Module):
    """Blocks in three lists; what runs when is up to `run`."""

    def __init__(self, run: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.middle = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.seed = ""
        self.drops = True
        self._run = run

    def kept(self, blocks: nn.ModuleList) -> Iterator[nn.Module]:
        """Half of them, at random."""
        draw = random.Random(f"{self.seed}, {len(blocks)}, {blocks is self.first}")
        return (block for block in blocks if not self.drops or draw.random() < 0.5)

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
    """As an encoder whose decoder is defined before it, and uses what it returns everywhere."""
    return through(net.kept(net.first), x, through(net.kept(net.middle), x))


def towers(net: Net, x: torch.Tensor) -> torch.Tensor:
    """None has a graph behind its input."""
    return sum((through(net.kept(each), x) for each in (net.middle, net.last, net.first)), x)


def recomputed(net: Net, x: torch.Tensor, reentrant: bool = False) -> torch.Tensor:
    for blocks in (net.first, net.middle, net.last):
        for block in net.kept(blocks):
            x = checkpoint(block, x.requires_grad_(), use_reentrant=reentrant)
    return x


def recomputed_inside(net: Net, x: torch.Tensor) -> torch.Tensor:
    return recomputed(net, x, reentrant=True)


def put_aside(net: Net, x: torch.Tensor) -> torch.Tensor:
    """All blocks run on all ranks; what some of them return is what they were given."""
    x = net.first[0](x)
    for blocks in (net.middle, net.last):
        kept = set(net.kept(blocks))
        for block in blocks:
            x = block(x, keep=block in kept)
    return x


IN_ORDER = (in_a_row, recomputed, recomputed_inside, put_aside)
IN_ANOTHER = (decoder_first, towers)


def data(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(4, WIDTH, generator=generator)


def plain(run: Callable[[Net, torch.Tensor], torch.Tensor], drops: bool = True) -> list[float]:
    net = Net(run)
    net.drops = drops
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


def trained(run: Callable[[Net, torch.Tensor], torch.Tensor], drops: bool) -> list[float | None]:
    net = Net(run)
    net.drops = drops
    sgd = {"type": "SGD", "params": {"lr": 0.01}}
    engine = make(config(3, "fp32", MICRO, optimizer=sgd, gradient_clipping=0.0), net)
    norms = []
    for step in range(STEPS):
        for micro in range(MICRO):
            net.seed = f"{step}, {micro}, {engine.mesh.rank()}"
            engine.backward(engine(data(step, micro, engine.mesh.rank())))
            result = engine.step()
        norms.append(result.grad_norm)
    engine.destroy()
    return norms


def all_trained() -> list[list[float | None]]:
    return [trained(run, True) for run in IN_ORDER] + [trained(run, False) for run in IN_ANOTHER]


def test_units_may_be_dropped_by_some_ranks_or_run_in_another_order() -> None:
    expected = [plain(run) for run in IN_ORDER] + [plain(run, False) for run in IN_ANOTHER]
    for norms in run_ranks(all_trained, RANKS):
        for number, (seen, norm) in enumerate(zip(norms, expected, strict=True)):
            assert seen == pytest.approx(norm, rel=1e-5), number


def refused(run: Callable[[Net, torch.Tensor], torch.Tensor]) -> str:
    with pytest.raises(RankError) as caught:
        trained(run, True)
    return str(caught.value)


@pytest.mark.parametrize("run", IN_ANOTHER)
def test_both_together_is_an_error(run: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
    for message in run_ranks(refused, RANKS, run):
        assert "order" in message or "gather" in message, message
