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
from torch.nn.utils import parametrizations, parametrize

from tests.habits.loop import Habit, Loop, Trainer, each, habits_of
from tests.habits.networks import WIDTH, Block, Net, as_loss_of, fit, fitted, square, step_on

# --- which blocks run, and how --------------------------------------------------------------------------


class Skips(Net):
    """Runs some of its blocks, in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for number in self.order:
            h = self.blocks[number](h)
        return self.head(h)


def ordered(loop: Loop, orders: Any) -> None:
    """LayerDrop, the same on every rank or with each rank's own random numbers; a recurrent depth."""
    net = loop.train(Skips())
    for number, order in enumerate(orders(loop.rank)):
        net.module.order = order
        fit(loop, net, steps=1, seed=number)


ORDERS: dict[str, Any] = {
    "blocks_that_are_dropped": lambda rank: [[0, 2], [1], [0, 1, 2], []],
    "blocks_that_each_rank_drops": lambda rank: (
        [[0, 2], [1, 2], [2], []] if rank else [[1], [0, 1, 2], [0], [0, 1, 2]]
    ),
    "blocks_in_another_order": lambda rank: [[2, 1, 0], [1, 0, 2], [0, 1, 2]],
    "blocks_that_run_again": lambda rank: [[0, 1, 1, 1, 2], [0, 0, 0], [2, 0, 2]],
}
"""Name of the habit -> the blocks of each step on a rank."""


class StochasticDepth(Block):
    """Samples, not blocks, are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        keep = (torch.rand(len(x), 1) > 0.5).to(x.dtype) if self.training else 1.0
        return x + keep * (super().forward(x) - x)


class RandomNumberOfBlocks(Net):
    """Python's own random numbers, the same on all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for block in self.blocks[: random.randint(1, 3)]:
            h = block(h)
        return self.head(h)


class BlockThatNobodyCalls(Net):
    """A part that is there for another task."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.spare = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](self.blocks[0](self.into(x))))


class Towers(Net):
    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.into(x)
        return [block(h) for block in self.blocks]


@as_loss_of(Towers, 3)
def towers(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Each rank's loss uses another block of those that ran."""
    return square(net(x)[loop.rank])


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


class ForwardOfABlock(Net):
    """`block.forward(x)`: its hooks do not run."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head.forward(self.trunk(x))


class PartsOfBlocks(Net):
    """The parent calls what is in a block, and the block is only a holder."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block.down(F.gelu(block.up(x)))


class Two(Block):
    """A block with methods of its own."""

    def encode(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def decode(self, x: Tensor) -> Tensor:
        return self.down(x)


class Auto(Net):
    """Calls them."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block.decode(block.encode(x))


def units_that_are_written(loop: Loop) -> None:
    """The same with the parts of blocks as units, as the refusal says."""
    fit(loop, loop.train(Auto(Two), sharding={"units": ["blocks.*.*"]}), steps=3)


class Losses(Net):
    def loss(self, x: Tensor) -> Tensor:
        return square(self(x))


@as_loss_of(Losses)
def another_method_of_the_model(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """`net.module.loss(x)`, with gradients."""
    return net.module.loss(x)


class ListsOfLists(nn.Module):
    """Blocks that are lists of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attention, feed in self.layers:
            x = feed(attention(x))
        return x


class ListsOfDicts(nn.Module):
    """Blocks that are dicts of modules, with a bare parameter beside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": Block(), "norm": nn.LayerNorm(WIDTH)}) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["norm"](layer["attention"](x)) * self.scale
        return x


def lists_of_parameters(loop: Loop) -> None:
    """ParameterList and ParameterDict."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(3))
            self.named = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.ones(())})

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = torch.tanh(x @ weight + self.named["a"])
            return x * self.named["b"]

    fit(loop, loop.train(Net(Bare)))
    fit(loop, loop.train(Bare()))


def one_layer_alone(loop: Loop) -> None:
    """A model that is nothing but a Linear, and a Sequential."""
    fit(loop, loop.train(nn.Linear(WIDTH, 2)))
    fit(loop, loop.train(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))))


class ModelInAWrapper(nn.Module):
    """A module that is called with everything, and one that is held where torch does not see it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        object.__setattr__(self, "hidden", inner.blocks[0])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs) + self.hidden(args[0])


# --- weights in several places --------------------------------------------------------------------------


class WeightOfABlockElsewhere(Net):
    """A loss or a parent that reads a block's weight by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[1].down.bias


class TiedByHand(Net):
    """An embedding that is the head, and two blocks that share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.into.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight


def tied_by_a_function(loop: Loop) -> None:
    """The embedding's weight in `F.linear`, transposed."""

    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.head = nn.Embedding(11, WIDTH), nn.Identity()

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.trunk(tokens), self.into.weight)

    net = loop.train(Tied())
    data = [loop.integers(number, 11, 2, 5) for number in range(2)]
    step_on(net, (F.cross_entropy(net(x).float().flatten(0, 1), x.flatten()) for x in data))


class OneBlockInTwoPlaces(Net):
    """The same module object twice in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])


# --- buffers and parametrizations -----------------------------------------------------------------------


class BuffersThatAForwardUpdates(Block):
    """A counter, a running mean, one that is assigned anew, one that is not saved."""

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


class Normed(nn.Module):
    """Computes its norm in the norm's own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).to(self.norm.weight.dtype)).to(x.dtype)


def batch_norm(loop: Loop) -> None:
    """Its running statistics stay fp32, and torch does not mix them with bf16 weights."""
    fit(loop, loop.train(Net(Normed)), steps=3)


def batch_norm_that_is_pinned(loop: Loop) -> None:
    rule = {"match": "*.norm.*", "pin": "fp32", "output": "input"}
    net = loop.train(Net(Normed), precision={"rules": [rule]})
    fit(loop, net, steps=3)
    net.module.eval()
    loop.see("evaluated", net(loop.data(9)))


class Spectral(Block):
    """Computes its first matrix in the matrix's own dtype."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.up)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x.to(self.up.bias.dtype)).to(x.dtype)))


def spectral_norm(loop: Loop) -> None:
    """Its power iteration changes buffers in the forward."""
    fit(loop, loop.train(Net(Spectral)))


def spectral_norm_that_is_pinned(loop: Loop) -> None:
    rule = {"match": "*.up.*", "pin": "fp32", "output": "input"}
    fit(loop, loop.train(Net(Spectral), precision={"rules": [rule]}))


class WeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.down)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Parametrization(Block):
    """Symmetric matrices, and one that is cached for a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(WIDTH, WIDTH, bias=False)
        parametrize.register_parametrization(self.square, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().forward(self.square(self.square(x)))


class WeightsFromWeights(nn.Module):
    """A hypernetwork: one module makes another's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(4))
        self.make = nn.Linear(4, WIDTH * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.make(self.code).view(WIDTH, WIDTH)))


# --- kinds of layers ------------------------------------------------------------------------------------


def dropout(loop: Loop) -> None:
    """The same random numbers as plain torch draws."""

    class Drops(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.4, self.training)

    net = loop.train(Net(Drops))
    fit(loop, net)
    net.module.eval()
    loop.see("evaluated", net(loop.data(9)))


class Recurrent(nn.Module):
    """An LSTM between two matrices."""

    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.rnn(x, state)
        return self.head(out), state


def recurrent_layers(loop: Loop) -> None:
    """LSTM and GRU, their state carried on and detached."""
    for kind in (nn.LSTM, nn.GRU):
        net = loop.train(Recurrent(kind))
        state = None
        for number in range(3):
            out, state = net(loop.data(number, 2, 5, WIDTH), state)
            state = tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()
            net.backward(square(out))
            net.step()


def recurrent_layers_in_blocks(loop: Loop) -> None:
    class Block2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.norm = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.rnn.flatten_parameters()
            return self.norm(x + self.rnn(x)[0])

    net = loop.train(Net(Block2))
    step_on(net, (square(net(loop.data(number, 2, 5, WIDTH))) for number in range(2)))


def a_recurrent_cell(loop: Loop) -> None:
    """A cell called once per step of time."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(len(x), WIDTH, dtype=x.dtype)
            for part in x.unbind(1):
                h = self.cell(part, h)
            return self.head(h)

    net = loop.train(Cell())
    fit(loop, net, lambda x: square(net(x.view(1, 4, WIDTH))))


def attention(loop: Loop) -> None:
    """torch's own encoder layers, with masks."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=mask)

    net = loop.train(Encoder())
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    step_on(net, (square(net(loop.data(number, 2, 5, WIDTH), mask)) for number in range(2)))
    net.module.eval()
    # With gradients, which keeps torch from a fast path of its own that hooks on modules turn off.
    loop.see("evaluated", net(loop.data(9, 2, 5, WIDTH), mask)[~mask])


def an_encoder_and_a_decoder(loop: Loop) -> None:
    class Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.model(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(3).to(x.dtype))

    net = loop.train(Seq())
    step_on(
        net,
        (
            square(net(loop.data(number, 2, 5, WIDTH), loop.data(number + 5, 2, 3, WIDTH)))
            for number in range(2)
        ),
    )


def convolutions(loop: Loop) -> None:
    """Conv, GroupNorm, pooling, in channels_last."""

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH), nn.SiLU())
                for _ in range(2)
            )
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            for block in self.blocks:
                h = h + block(h)
            return self.head(h.mean((2, 3)))

    net = loop.train(Image())
    for number in range(2):
        x = loop.data(number, 2, 3, 6, 6)
        net.backward(square(net(x.to(memory_format=torch.channels_last) if number else x)))
        net.step()


class ScalarsAndEmptyParameters(Block):
    """0-D parameters (a temperature), and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(math.log(2.0)))
        self.gain = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature.exp() * self.gain + self.nothing.sum()


def sparse_gradients(loop: Loop) -> None:
    """`nn.Embedding(sparse=True)`."""

    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(11, WIDTH, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(self.tokens(tokens))

    net = loop.train(Sparse())
    step_on(net, (square(net(loop.integers(number, 11, 2, 5))) for number in range(2)))


class ComplexNumbers(Block):
    """A Fourier layer: complex tensors in the middle, and as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.polar(torch.ones(5), torch.arange(5.0)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.irfft(torch.fft.rfft(x.float()) * self.phase, WIDTH).to(x.dtype))


def complex_inputs_and_outputs(loop: Loop) -> None:
    """A model that takes complex numbers keeps them."""

    class Both(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(torch.cat([x.real, x.imag], -1).to(self.into.weight.dtype))
            return torch.complex(h.float(), h.float() * 2)

    net = loop.train(Both())
    for number in range(2):
        real = loop.data(number, 4, WIDTH // 2).float()
        out = net(torch.complex(real, 2 * real))
        loop.see("out", out)
        net.backward(out.abs().square().mean())
        net.step()


def frozen_parts(loop: Loop) -> None:
    """A frozen trunk, its gradients passing through, and a frozen bias in a block that trains."""
    model = Net()
    model.into.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.bias.requires_grad_(False)
    fit(loop, loop.train(model), steps=3)


def adapters(loop: Loop) -> None:
    """LoRA by hand before the engine: everything else is frozen."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, base.in_features))
            self.b = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.a.T @ self.b.T

    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Lora(block.up), Lora(block.down)
    fit(loop, loop.train(model), steps=3)


class AutocastInsideTheModel(Block):
    """A model with autocast of its own, and parts where it is off."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return y.to(x.dtype) + x


def blocks_that_are_compiled(loop: Loop) -> None:
    """`block.compile()`, hooks and all."""
    model = Net()
    model.blocks[1].compile(backend="eager")
    fit(loop, loop.train(model))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class NormsInFp32(Block):
    """RMSNorm as Llama has it: computed in fp32 whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


FITTED: dict[str, Any] = {
    "stochastic_depth": (lambda: Net(StochasticDepth), 3),
    "a_random_number_of_blocks": (lambda: RandomNumberOfBlocks(), 4),
    "a_block_that_nobody_calls": (lambda: BlockThatNobodyCalls(), 2),
    "experts_by_rank": (lambda: Net(ExpertsByRank), 3),
    "the_forward_of_a_block": (lambda: ForwardOfABlock(), 2),
    "parts_of_blocks": (lambda: PartsOfBlocks(), 2),
    "another_method_of_a_block": (lambda: Auto(Two), 2),  # `block.encode(x)` and `block.decode(x)`.
    "lists_of_lists": (lambda: ListsOfLists(), 2),
    "lists_of_dicts": (lambda: ListsOfDicts(), 2),
    "a_model_in_a_wrapper": (lambda: ModelInAWrapper(Net()), 2),
    "the_weight_of_a_block_elsewhere": (lambda: WeightOfABlockElsewhere(), 2),
    "tied_by_hand": (lambda: TiedByHand(), 2),
    "one_block_in_two_places": (lambda: OneBlockInTwoPlaces(), 2),
    "buffers_that_a_forward_updates": (lambda: Net(BuffersThatAForwardUpdates), 3),
    "weight_norm": (lambda: Net(WeightNorm), 2),
    "a_parametrization": (lambda: Net(Parametrization), 2),
    "weights_from_weights": (lambda: Net(WeightsFromWeights), 2),
    "scalars_and_empty_parameters": (lambda: Net(ScalarsAndEmptyParameters), 2),
    "complex_numbers": (lambda: Net(ComplexNumbers), 2),
    "autocast_inside_the_model": (lambda: Net(AutocastInsideTheModel), 2),
    "norms_in_fp32": (lambda: Net(NormsInFp32), 2),
}
"""Name of the habit -> (its model, the steps that it is trained)."""


HABITS = habits_of(
    globals(),
    *each(ordered, ORDERS),
    *each(fitted, FITTED),
    Habit(
        batch_norm,
        refused="must compute in the dtype of its buffers",
        modes=("bf16",),
        why="torch mixes no dtypes in it",
    ),
    Habit(
        spectral_norm,
        refused="must compute in the dtype of its buffers",
        modes=("bf16",),
        why="torch mixes no dtypes in it",
    ),
)
