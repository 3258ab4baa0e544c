"""Parameters that are used outside of their block, and blocks that are no modules one calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.dropin.script import WIDTH, Run, Script, square


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) * self.scale

    def encode(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def decode(self, x: Tensor) -> Tensor:
        return self.down(x) * self.scale


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def reads(forward: Callable[[Any, Tensor], Tensor]) -> type[Net]:
    """Return a model with another forward."""
    return type("Reads", (Net,), {"forward": forward})


def _stacked(self: Any, x: Tensor, call: Callable[[Any, Tensor], Tensor]) -> Tensor:
    h = self.into(x)
    for block in self.blocks:
        h = call(block, h)
    return h


# --- a block's parameter outside of it: forwards of a `Net` ----------------------------------------------


def the_weight_of_a_block_behind_it(self: Any, x: Tensor) -> Tensor:
    """A head that computes with the matrix of a block, which has run."""
    return F.linear(Net.forward(self, x), self.blocks[0].up.weight)


def the_weight_of_a_block_before_it(self: Any, x: Tensor) -> Tensor:
    """The same before the block runs."""
    return Net.forward(self, x * self.blocks[2].scale + self.blocks[1].down.bias)


def a_penalty_in_the_forward(self: Any, x: Tensor) -> Tensor:
    """A loss that adds the squares of all weights, as some models do themselves."""
    penalty = sum(p.square().sum() for p in self.blocks.parameters())
    return Net.forward(self, x).square().mean() + 1e-3 * penalty


def a_weight_outside_under_checkpointing(self: Any, x: Tensor) -> Tensor:
    """In a function that is recomputed in the backward."""
    h = _stacked(self, x, lambda block, h: checkpoint(block, h, use_reentrant=False))
    return checkpoint(lambda h: F.linear(h, self.blocks[0].up.weight).tanh(), h, use_reentrant=False)


def other_methods_of_a_block(self: Any, x: Tensor) -> Tensor:
    """`block.encode(x)` and `block.decode(x)`, and no `block(x)`; a bare parameter is used in one of them."""
    return self.head(_stacked(self, x, lambda block, h: h + block.decode(block.encode(h))))


def the_parts_of_a_block(self: Any, x: Tensor) -> Tensor:
    """The parent calls what is in a block; the block is a holder."""
    return self.head(_stacked(self, x, lambda block, h: h + block.down(F.gelu(block.up(h))) * block.scale))


def the_forward_of_a_block(self: Any, x: Tensor) -> Tensor:
    """`block.forward(x)`, past its hooks."""
    return self.head.forward(_stacked(self, x, lambda block, h: block.forward(h)))


# --- models -----------------------------------------------------------------------------------------------


def a_block_that_reads_another() -> nn.Module:
    """Block 1 uses the weight of block 0 by a reference that is no submodule."""
    net = Net()

    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(F.linear(x, other[0].up.weight), other[0].down.weight)

    torch.manual_seed(3)
    net.blocks[1] = Reads()
    other = [net.blocks[0]]
    return net


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.linear.weight), self.linear.bias


def a_bias_that_is_returned() -> nn.Module:
    """A layer that returns its bias beside its output, for its caller to add: Megatron's `skip_bias_add`."""

    class Adds(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x, bias = block(x)
                x = torch.tanh(x + bias)
            return self.head(x)

    return Adds(Skips)


def a_list_of_dicts() -> nn.Module:
    """`ModuleList` of `ModuleDict`, as in timm and nanoGPT."""

    class Dicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.layers = nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH), "block": Block()})
                for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer["block"](layer["norm"](x + layer["up"](x).tanh()))
            return x

    return Dicts()


def nested_lists() -> nn.Module:
    """Lists in lists in lists, with bare parameters at the leaves."""

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH)]), nn.LayerNorm(WIDTH)])
                for _ in range(2)
            )
            self.rows = nn.ModuleList(
                nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)]) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            for (inner, norm), (scale, shift) in zip(self.layers, self.rows, strict=True):
                block, linear = inner
                x = norm(linear(block(x))) * scale + shift
            return x

    return Lists()


def a_dict_of_lists() -> nn.Module:
    """Towers by name, of which a batch takes one."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(7)
            self.towers = nn.ModuleDict(
                {name: nn.ModuleList([Block(), Block()]) for name in ("text", "image")}
            )
            self.head = nn.Linear(WIDTH, WIDTH)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for block in self.towers["text" if self.calls % 2 else "image"]:
                x = block(x)
            return self.head(x)

    return Towers()


# --- whole scripts ----------------------------------------------------------------------------------------


def a_registered_parameter(run: Run) -> None:
    """`zero.register_external_parameter`, as the documentation says."""
    net = reads(lambda self, x: F.linear(Net.forward(self, x), self.blocks[1].up.weight))()
    run.deepspeed.zero.register_external_parameter(net, net.blocks[1].up.weight)
    run.train(run.engine(net))


def a_weight_outside_in_evaluation(run: Run) -> None:
    """Without gradients, and then with."""
    engine = run.engine(reads(the_weight_of_a_block_behind_it)())
    engine.eval()
    with torch.no_grad():
        run.tell("evaluation", square(engine(run.data(9))))
    engine.train()
    run.train(engine)


def a_part_that_is_called_from_outside(run: Run) -> None:
    """`engine.module.blocks[0].up(x)` between two steps, in no forward."""
    engine = run.engine(Net())
    run.train(engine, steps=1)
    with torch.no_grad():
        run.tell("part", engine.module.blocks[0].up(run.data(8)))
    run.train(engine, steps=1, first=1)


def another_method_of_the_model(run: Run) -> None:
    """`engine.module.features(x)`, and a loss of that."""

    class Features(Net):
        def features(self, x: Tensor) -> Tensor:
            return _stacked(self, x, lambda block, h: block(h))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x))

    engine = run.engine(Features())
    run.train(engine, steps=1)
    with torch.no_grad():
        run.tell("features", engine.module.features(run.data(8)))
    run.train(engine, steps=1, first=1)


def trains(make: Callable[[], nn.Module], name: str, micro_batches: int = 1) -> Callable[[Run], None]:
    """Return a script that trains a model."""

    def script(run: Run) -> None:
        accumulation = {} if micro_batches == 1 else {"gradient_accumulation_steps": micro_batches}
        run.train(run.engine(make(), **accumulation), steps=3 if micro_batches == 1 else 2 * micro_batches)

    script.__name__ = name
    return script


BELOW_3 = (0, 1, 2)

FORWARDS = {
    the_weight_of_a_block_behind_it: {},
    the_weight_of_a_block_before_it: {},
    a_penalty_in_the_forward: {"alike": BELOW_3, "why": "its backward meets an empty parameter, and raises"},
    a_weight_outside_under_checkpointing: {},
    other_methods_of_a_block: {},
    the_parts_of_a_block: {},
    the_forward_of_a_block: {},
}
"""Forward of a `Net` -> what DeepSpeed does. Two of them train in two micro-batches."""

ACCUMULATED = (the_weight_of_a_block_before_it, the_parts_of_a_block)

MODELS = {
    a_block_that_reads_another: {},
    a_bias_that_is_returned: {},
    a_list_of_dicts: {},
    nested_lists: {},
    a_dict_of_lists: {"alike": BELOW_3, "why": "its trace is of the other tower: other losses"},
}

SCRIPTS = (
    *(
        Script(trains(reads(forward), forward.__name__, 2 if forward in ACCUMULATED else 1), **differs)
        for forward, differs in FORWARDS.items()
    ),
    *(Script(trains(make, make.__name__), **differs) for make, differs in MODELS.items()),
    Script(a_registered_parameter),
    Script(a_weight_outside_in_evaluation),
    Script(a_part_that_is_called_from_outside),
    Script(another_method_of_the_model),
)
