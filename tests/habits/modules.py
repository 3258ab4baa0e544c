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

from tests.habits.graphs import Recomputed
from tests.habits.loop import Habit, Loop, Trainer, each, habits_of, refused_cases
from tests.habits.networks import (
    ORDER,
    WIDTH,
    Block,
    Net,
    Parts,
    as_loss_of,
    fit,
    fitted,
    net_of,
    square,
    step_on,
)

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
    "blocks_that_are_dropped": lambda rank: [[0, 2], [1], [0, 1, 2], []],
    "blocks_that_each_rank_drops": lambda rank: (
        [[0, 2], [1, 2], [2], []] if rank else [[1], [0, 1, 2], [0], [0, 1, 2]]
    ),
    "blocks_in_another_order": lambda rank: [[2, 1, 0], [1, 0, 2], [0, 1, 2]],
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


class SumOfTowers(Skips):
    """A model of towers without a graph behind their input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum((block(x) for block in self.chosen()), x))


class PutsAside(Skips):
    """A model that runs all blocks, and leaves out what some return."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for number, block in enumerate(self.blocks):
            made = block(h)
            h = made if number in self.order else h
        return self.head(h)


def dropped(loop: Loop, make: Any) -> None:
    """Drop half of the blocks at random on each rank, in every micro-batch."""
    net = loop.train(make(), 2)
    draw = random.Random(loop.rank)
    for number in range(6):
        net.module.order = [block for block in range(3) if draw.random() < 0.5]
        fit(loop, net, steps=1, seed=number)


DROPPED: dict[str, Any] = {
    "blocks_that_each_rank_recomputes": lambda: RecomputedSkips(False),
    "blocks_that_each_rank_recomputes_reentrantly": lambda: RecomputedSkips(True),
    "a_decoder_that_comes_first": DecoderFirst,
    "towers_that_each_rank_drops": SumOfTowers,
    "blocks_whose_results_are_put_aside": PutsAside,
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


class Towers(Net):
    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.into(x)
        return [block(h) for block in self.blocks]


@as_loss_of(Towers, 3)
def towers(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Return a loss of one of the blocks that ran, another on each rank."""
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


def experts_that_are_units(loop: Loop) -> None:
    """Declare experts as units inside those of their blocks, which may be recomputed."""
    for model in (Net(ExpertsByRank), RecomputedSkips(False, ExpertsByRank)):
        fit(loop, loop.train(model, sharding={"units": ["blocks.*", "blocks.*.experts.*"]}), steps=3)


class ForwardOfABlock(Net):
    """A model that calls `block.forward(x)`, without its hooks."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head.forward(self.trunk(x))


class PartsOfBlocks(Net):
    """A model that calls the parts of a block, which is only a holder."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block.down(F.gelu(block.up(x)))


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
    fit(loop, loop.train(Auto(Two), sharding={"units": ["blocks.*.*"]}), steps=3)


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


class Losses(Net):
    def loss(self, x: Tensor) -> Tensor:
        return square(self(x))


@as_loss_of(Losses)
def another_method_of_the_model(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    """Call `net.module.loss(x)`, with gradients."""
    return net.module.loss(x)


def lists_of_dicts() -> nn.Module:
    """Make a model whose blocks are dicts of modules, with a bare parameter beside."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["norm"](layer["attention"](x)) * self.scale
        return x

    layers = (nn.ModuleDict({"attention": Block(), "norm": nn.LayerNorm(WIDTH)}) for _ in range(2))
    return Parts(forward, layers=nn.ModuleList(layers), scale=nn.Parameter(torch.ones(WIDTH)))


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
    """Train a single Linear, and a Sequential."""
    fit(loop, loop.train(nn.Linear(WIDTH, 2)))
    fit(loop, loop.train(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))))


class ModelInAWrapper(nn.Module):
    """A wrapper that calls its module with all arguments, and one that hides its module from torch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        object.__setattr__(self, "hidden", inner.blocks[0])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs) + self.hidden(args[0])


# --- weights in several places --------------------------------------------------------------------------


class SkipsBias(nn.Module):
    """A layer that returns its bias for its caller to add: Megatron's skip_bias_add."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.linear.weight), self.linear.bias


class BiasThatIsReturned(Net):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        out, bias = block(x)
        return torch.tanh(out + bias)


def tied_by_hand() -> Net:
    """Tie an embedding to the head, and a matrix of two blocks."""
    model = Net()
    model.head.weight, model.blocks[2].up.weight = model.into.weight, model.blocks[0].up.weight
    return model


def tied_by_a_function(loop: Loop) -> None:
    """Use the embedding's weight, transposed, in `F.linear`."""

    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.head = nn.Embedding(11, WIDTH), nn.Identity()

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.trunk(tokens), self.into.weight)

    net = loop.train(Tied())
    data = [loop.integers(number, 11, 2, 5) for number in range(2)]
    step_on(net, (F.cross_entropy(net(x).float().flatten(0, 1), x.flatten()) for x in data))


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


def spectral_norm(loop: Loop) -> None:
    """Train with a power iteration that changes buffers in the forward."""
    fit(loop, loop.train(Net(spectral)))


def spectral_norm_that_is_pinned(loop: Loop) -> None:
    rule = {"match": "*.up.*", "pin": "fp32", "output": "input"}
    fit(loop, loop.train(Net(spectral), precision={"rules": [rule]}))


def weight_normed() -> Block:
    block = Block()
    parametrizations.weight_norm(block.down)
    return block


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric() -> nn.Module:
    """Make a model with symmetric matrices, one of them cached for a forward."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.block(self.square(self.square(x)))

    square = nn.Linear(WIDTH, WIDTH, bias=False)
    return Parts(
        forward, square=parametrize.register_parametrization(square, "weight", Symmetric()), block=Block()
    )


def hypernetwork() -> nn.Module:
    """Make a model in which one module computes another's weight."""
    return Parts(
        lambda self, x: x + torch.tanh(F.linear(x, self.make(self.code).view(WIDTH, WIDTH))),
        code=nn.Parameter(torch.randn(4)),
        make=nn.Linear(4, WIDTH * WIDTH),
    )


# --- kinds of layers ------------------------------------------------------------------------------------


def recurrent(kind: Any) -> nn.Module:
    """Make a model of recurrent layers and a matrix, with the state as input and output."""

    def forward(self: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        out, state = self.rnn(x, state)
        return self.head(out), state

    rnn = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
    return Parts(forward, rnn=rnn, head=nn.Linear(WIDTH, 3))


def recurrent_layers(loop: Loop) -> None:
    """Train LSTM and GRU, whose state is carried on and detached."""
    for kind in (nn.LSTM, nn.GRU):
        net = loop.train(recurrent(kind))
        state = None
        for number in range(3):
            out, state = net(loop.data(number, 2, 5, WIDTH), state)
            state = tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()
            net.backward(square(out))
            net.step()


def recurrent_layers_in_blocks(loop: Loop) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        return self.norm(x + self.rnn(x)[0])

    def block() -> nn.Module:
        return Parts(forward, rnn=nn.LSTM(WIDTH, WIDTH, batch_first=True), norm=nn.LayerNorm(WIDTH))

    net = loop.train(Net(block))
    step_on(net, (square(net(loop.data(number, 2, 5, WIDTH))) for number in range(2)))


def attention(loop: Loop) -> None:
    """Train torch's own encoder layers, with masks."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    net = loop.train(Parts(lambda self, x, mask: self.encoder(x, src_key_padding_mask=mask), encoder=encoder))
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    step_on(net, (square(net(loop.data(number, 2, 5, WIDTH), mask)) for number in range(2)))
    net.module.eval()
    # With gradients, which keeps torch from a fast path of its own that hooks on modules turn off.
    loop.see("evaluated", net(loop.data(9, 2, 5, WIDTH), mask)[~mask])


def convolutions(loop: Loop) -> None:
    """Train Conv, GroupNorm and pooling, in channels_last."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h.mean((2, 3)))

    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH), nn.SiLU())

    stem, blocks = nn.Conv2d(3, WIDTH, 3, padding=1), nn.ModuleList(block() for _ in range(2))
    net = loop.train(Parts(forward, stem=stem, blocks=blocks, head=nn.Linear(WIDTH, 2)))
    data = [loop.data(number, 2, 3, 6, 6) for number in range(2)]
    data[1] = data[1].to(memory_format=torch.channels_last)
    step_on(net, (square(net(x)) for x in data))


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


def fourier() -> nn.Module:
    """Make a model with a Fourier layer: complex tensors in the middle, and as a buffer."""

    def forward(self: Any, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x.float()) * self.phase
        return self.block(torch.fft.irfft(waves, WIDTH).to(x.dtype))

    module = Parts(forward, block=Block())
    module.register_buffer("phase", torch.polar(torch.ones(5), torch.arange(5.0)))
    return module


class Complex(Net):
    """A model that keeps complex inputs."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(torch.cat([x.real, x.imag], -1).to(self.into.weight.dtype)).float()
        return torch.complex(h, h * 2)


@as_loss_of(Complex)
def complex_inputs_and_outputs(loop: Loop, net: Trainer, x: Tensor) -> Tensor:
    real = x[:, : WIDTH // 2].float()
    out = net(torch.complex(real, 2 * real))
    loop.see("out", out)
    return out.abs().square().mean()


def frozen_parts(loop: Loop) -> None:
    """Freeze a trunk that gradients pass through, and a bias in a block that trains."""
    model = Net()
    model.into.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.bias.requires_grad_(False)
    fit(loop, loop.train(model), steps=3)


def adapters(loop: Loop) -> None:
    """Add LoRA by hand before the engine, with everything else frozen."""

    def lora(base: nn.Linear) -> nn.Module:
        return Parts(
            lambda self, x: self.base(x) + x @ self.a.T @ self.b.T,
            base=base.requires_grad_(False),
            a=nn.Parameter(torch.randn(2, base.in_features)),
            b=nn.Parameter(torch.zeros(base.out_features, 2)),
        )

    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = lora(block.up), lora(block.down)
    fit(loop, loop.train(model), steps=3)


class AutocastInsideTheModel(Block):
    """A block with autocast of its own, and parts without."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return y.to(x.dtype) + x


def blocks_that_are_compiled(loop: Loop) -> None:
    """Call `block.compile()` on blocks with hooks."""
    model = Net()
    model.blocks[1].compile(backend="eager")
    fit(loop, loop.train(model))


def _rms(self: Any, x: Tensor) -> Tensor:
    h = x.float()
    return self.weight * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def llama_normed() -> nn.Module:
    """Make a model with Llama's RMSNorm, which computes in fp32 for any input."""
    return Parts(
        lambda self, x: self.block(self.norm(x)),
        norm=Parts(_rms, weight=nn.Parameter(torch.ones(WIDTH))),
        block=Block(),
    )


def scripted_block() -> nn.Module:
    """A network in which one block is compiled by TorchScript."""
    model = Net()
    model.blocks[1] = torch.jit.script(model.blocks[1])
    return model


TORCHSCRIPT: dict[str, Any] = {
    "a_scripted_block": ((scripted_block, 1), "`blocks.1`: must run in Python"),
    "a_traced_model": (
        (lambda: torch.jit.trace(Net(), torch.ones(4, WIDTH)), 1),
        "`model`: must run in Python",
    ),
}

FITTED: dict[str, Any] = {
    "a_block_that_nobody_calls": (BlockThatNobodyCalls, 2),
    "experts_by_rank": (lambda: Net(ExpertsByRank), 3),
    "the_forward_of_a_block": (ForwardOfABlock, 2),
    "parts_of_blocks": (PartsOfBlocks, 2),
    "another_method_of_a_block": (lambda: Auto(Two), 2),  # `block.encode(x)` and `block.decode(x)`.
    "lists_of_dicts": (lists_of_dicts, 2),
    "a_model_in_a_wrapper": (lambda: ModelInAWrapper(Net()), 2),
    "the_weight_of_a_block_elsewhere": (
        net_of(lambda self, x: Net.forward(self, x) + self.blocks[1].down.bias),
        2,
    ),
    "a_penalty_in_the_forward": (
        net_of(
            lambda self, x: square(Net.forward(self, x)) + 1e-3 * sum(map(square, self.blocks.parameters()))
        ),
        2,
    ),
    "a_bias_that_is_returned": (lambda: BiasThatIsReturned(SkipsBias), 2),
    "tied_by_hand": (tied_by_hand, 2),
    "one_block_in_two_places": (one_block_in_two_places, 2),
    "buffers_that_a_forward_updates": (lambda: Net(BuffersThatAForwardUpdates), 3),
    "weight_norm": (lambda: Net(weight_normed), 2),
    "a_parametrization": (lambda: Net(symmetric), 2),
    "weights_from_weights": (lambda: Net(hypernetwork), 2),
    "scalars_and_empty_parameters": (lambda: Net(scalars), 2),
    "complex_numbers": (lambda: Net(fourier), 2),
    "autocast_inside_the_model": (lambda: Net(AutocastInsideTheModel), 2),
    "norms_in_fp32": (lambda: Net(llama_normed), 2),
}
"""Name of the habit -> (its model, the steps that it is trained)."""


HABITS = habits_of(
    globals(),
    *each(ordered, ORDERS),
    *each(dropped, DROPPED),
    Habit(a_block_that_runs_again_reentrantly, close=ORDER, why="its uses are added in another order"),
    *each(fitted, FITTED),
    *refused_cases("its forward runs no hooks", fitted, TORCHSCRIPT),
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
