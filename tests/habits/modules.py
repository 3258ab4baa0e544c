"""Shapes of models: ties, lists of lists, shared and skipped blocks, buffers, odd parameters.

Invariant: a model need not look like a transformer to be trained like one.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

from tests.habits.graphs import Recomputed
from tests.habits.loop import Habit, Loop, each, habits_of
from tests.habits.networks import ORDER, WIDTH, Block, Net, Parts, fit, fitted, net_of, square, step_on

# --- which blocks run, and how --------------------------------------------------------------------------


class Skips(Net):
    """A model that runs some of its blocks, in an order of its own."""

    order: list[int]

    def chosen(self) -> list[nn.Module]:
        return [self.blocks[number] for number in self.order]


def ordered(loop: Loop, orders: Any) -> None:
    """Drop layers, the same on every rank or with each rank's own random numbers; or recur."""
    net = loop.train(Skips())
    for number, order in enumerate(orders(loop.rank)):
        net.module.order = order
        fit(loop, net, steps=1, seed=number)


ORDERS: dict[str, Any] = {
    "blocks_that_each_rank_drops": lambda rank: (
        [[0, 2], [1, 2], [2], []] if rank else [[1], [0, 1, 2], [0], [0, 1, 2]]
    ),
    "blocks_that_run_again": lambda rank: [[0, 1, 1, 1, 2], [0, 0, 0], [2, 0, 2]],
}
"""Name of the habit -> the blocks of each step on a rank."""


class RecomputedSkips(Skips, Recomputed):
    """A model that recomputes the blocks that it runs."""

    order = [0, 1, 2]


class DecoderFirst(Skips):
    """A model whose first blocks are a decoder, which uses the encoder's output everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        memory = h
        for number in self.order:
            memory = self.blocks[number](memory) if number else memory
        return self.head(self.blocks[0](h + memory) if 0 in self.order else memory)


def dropped(loop: Loop, make: Any) -> None:
    """Drop half of the blocks at random on each rank, in every micro-batch."""
    net = loop.train(make(), 2)
    draw = random.Random(loop.rank)
    for number in range(6):
        net.module.order = [block for block in range(3) if draw.random() < 0.5]
        fit(loop, net, steps=1, seed=number)


DROPPED: dict[str, Any] = {
    "blocks_that_each_rank_recomputes": lambda: RecomputedSkips(False),
    "a_decoder_that_comes_first": DecoderFirst,
}


def a_block_that_runs_again_reentrantly(loop: Loop) -> None:
    net = loop.train(RecomputedSkips(True))
    net.module.order = [0, 1, 0, 2, 0]
    fit(loop, net)


class BlockThatNobodyCalls(Net):
    """A model with a part for another task, and with blocks that are called."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.spare = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))

    def chosen(self) -> list[nn.Module]:
        return [self.blocks[0], self.blocks[2]]


class ExpertsByRank(nn.Module):
    """A mixture of experts whose ranks send their tokens to other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).float().softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = (choice == number).nonzero()[:, 0]
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]) * weight[mine, None].to(x.dtype))
        return x + out


def experts_that_are_units(loop: Loop) -> None:
    """Declare experts as units inside those of their blocks, which are recomputed."""
    model = RecomputedSkips(False, ExpertsByRank)
    fit(loop, loop.train(model, sharding={"units": ["blocks.*", "blocks.*.experts.*"]}))


class ForwardOfABlock(Net):
    """A model that calls `block.forward(x)`, without its hooks."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head.forward(self.trunk(x))


class Two(Block):
    """A block with methods of its own."""

    def encode(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def decode(self, x: Tensor) -> Tensor:
        return self.down(x)


class Auto(Net):
    """A model that calls methods of its blocks."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block.decode(block.encode(x))


def units_that_are_written(loop: Loop) -> None:
    """Declare the parts of blocks as units, as the refusal advises."""
    fit(loop, loop.train(Auto(Two), sharding={"units": ["blocks.*.*"]}))


def parts_by_themselves(loop: Loop) -> None:
    """Call a block, parts of blocks and the head by themselves, with gradients and without."""
    net = loop.train(Net())

    def loss(x: Tensor) -> Tensor:
        with torch.inference_mode():
            loop.see("evaluated", net.module.blocks[0].up(x).clone())
        parts = [
            net.module.get_submodule(path)(x) for path in ("blocks.1", "blocks.1.up", "blocks.0", "head")
        ]
        loop.see("parts", parts)
        return square(net(x)) + sum(map(square, parts))

    fit(loop, net, loss)


def bare() -> nn.Module:
    """Make a model of ParameterList and ParameterDict."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight + self.named["a"])
        return x * self.named["b"]

    return Parts(
        forward,
        weights=nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(3)),
        named=nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.ones(())}),
    )


def lists_of_parameters(loop: Loop) -> None:
    fit(loop, loop.train(Net(bare)))
    fit(loop, loop.train(bare()))


def one_layer_alone(loop: Loop) -> None:
    fit(loop, loop.train(nn.Linear(WIDTH, 2)))


# --- weights in several places --------------------------------------------------------------------------


def tied_by_hand() -> Net:
    """Tie an embedding to the head, and a matrix of two blocks."""
    model = Net()
    model.head.weight, model.blocks[2].up.weight = model.into.weight, model.blocks[0].up.weight
    return model


def one_block_in_two_places() -> Net:
    """Put the same module object into the list twice."""
    model = Net()
    model.blocks.append(model.blocks[0])
    return model


# --- buffers and parametrizations -----------------------------------------------------------------------


class BuffersThatAForwardUpdates(Block):
    """A block with a counter, a running mean, a buffer that is assigned anew, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
            self.last = x.detach().float().sum(0)
        return super().forward(x - self.mean.to(x.dtype))


def normed() -> nn.Module:
    """Make a model that computes its norm in the norm's own dtype."""
    return Parts(
        lambda self, x: x + self.norm(self.linear(x).to(self.norm.weight.dtype)).to(x.dtype),
        linear=nn.Linear(WIDTH, WIDTH),
        norm=nn.BatchNorm1d(WIDTH),
    )


def batch_norm(loop: Loop) -> None:
    """Train with running statistics that stay fp32, which torch does not mix with bf16 weights."""
    fit(loop, loop.train(Net(normed)), steps=3)


def batch_norm_that_is_pinned(loop: Loop) -> None:
    rule = {"match": "*.norm.*", "pin": "fp32", "output": "input"}
    net = loop.train(Net(normed), precision={"rules": [rule]})
    fit(loop, net, steps=3)
    net.module.eval()
    loop.see("evaluated", net(loop.data(9)))


def spectral() -> nn.Module:
    """Make a model that computes its first matrix in the matrix's own dtype."""
    up = parametrizations.spectral_norm(nn.Linear(WIDTH, 2 * WIDTH))
    return Parts(
        lambda self, x: x + self.down(F.gelu(self.up(x.to(self.up.bias.dtype)).to(x.dtype))),
        up=up,
        down=nn.Linear(2 * WIDTH, WIDTH),
    )


def spectral_norm_that_is_pinned(loop: Loop) -> None:
    rule = {"match": "*.up.*", "pin": "fp32", "output": "input"}
    fit(loop, loop.train(Net(spectral), precision={"rules": [rule]}))


def weight_normed() -> Block:
    block = Block()
    parametrizations.weight_norm(block.down)
    return block


# --- kinds of layers ------------------------------------------------------------------------------------


def recurrent_layers(loop: Loop) -> None:
    """Train an LSTM, whose state is an input and an output, and detached between steps."""

    def forward(self: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        out, state = self.rnn(x, state)
        return self.head(out), state

    rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
    net = loop.train(Parts(forward, rnn=rnn, head=nn.Linear(WIDTH, 3)))
    state = None
    for number in range(3):
        out, state = net(loop.data(number, 2, 5, WIDTH), state)
        state = tuple(part.detach() for part in state)
        net.backward(square(out))
        net.step()


def scalars() -> nn.Module:
    """Make a model with 0-D parameters (a temperature), and one without elements."""
    return Parts(
        lambda self, x: self.block(x) * self.temperature.exp() * self.gain + self.nothing.sum(),
        block=Block(),
        temperature=nn.Parameter(torch.tensor(math.log(2.0))),
        gain=nn.Parameter(torch.ones(1)),
        nothing=nn.Parameter(torch.empty(0, WIDTH)),
    )


def sparse_gradients(loop: Loop) -> None:
    """Train `nn.Embedding(sparse=True)`."""
    tokens = nn.Embedding(11, WIDTH, sparse=True)
    net = loop.train(Parts(lambda self, ids: self.net(self.tokens(ids)), net=Net(), tokens=tokens))
    step_on(net, (square(net(loop.integers(number, 11, 2, 5))) for number in range(2)))


def frozen_parts(loop: Loop) -> None:
    """Freeze a trunk that gradients pass through, and a bias in a block that trains."""
    model = Net()
    model.into.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.bias.requires_grad_(False)
    fit(loop, loop.train(model), steps=3)


class AutocastInsideTheModel(Block):
    """A block with autocast of its own, and parts without."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return y.to(x.dtype) + x


def a_scripted_block(loop: Loop) -> None:
    """Compile one block by TorchScript, whose forward runs no hooks."""
    model = Net()
    model.blocks[1] = torch.jit.script(model.blocks[1])
    fit(loop, loop.train(model))


FITTED: dict[str, Any] = {
    "a_block_that_nobody_calls": BlockThatNobodyCalls,
    "experts_by_rank": lambda: Net(ExpertsByRank),
    "the_forward_of_a_block": ForwardOfABlock,
    "another_method_of_a_block": lambda: Auto(Two),  # `block.encode(x)` and `block.decode(x)`.
    "the_weight_of_a_block_elsewhere": net_of(
        lambda self, x: Net.forward(self, x) + self.blocks[1].down.bias
    ),
    "weights_of_several_blocks_in_one_operation": net_of(
        lambda self, x: (
            Net.forward(self, x) * torch.stack([block.up.weight for block in self.blocks]).prod(0).sum()
        )
    ),
    "tied_by_hand": tied_by_hand,
    "one_block_in_two_places": one_block_in_two_places,
    "buffers_that_a_forward_updates": lambda: Net(BuffersThatAForwardUpdates),
    "weight_norm": lambda: Net(weight_normed),
    "scalars_and_empty_parameters": lambda: Net(scalars),
    "autocast_inside_the_model": lambda: Net(AutocastInsideTheModel),
}
"""Name of the habit -> its model."""


HABITS = habits_of(
    globals(),
    *each(ordered, ORDERS),
    *each(dropped, DROPPED),
    Habit(a_block_that_runs_again_reentrantly, close=ORDER, why="its uses are added in another order"),
    *each(fitted, FITTED),
    Habit(a_scripted_block, refused="`blocks.1`: must run in Python", why="its forward runs no hooks"),
    Habit(
        batch_norm,
        refused="must compute in the dtype of its buffers",
        modes=("bf16",),
        why="torch mixes no dtypes in it",
    ),
)
