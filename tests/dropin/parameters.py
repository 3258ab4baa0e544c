"""Parameters that are used outside of their block, and blocks that are no modules one calls."""

from __future__ import annotations

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


# --- a block's parameter outside of it --------------------------------------------------------------------


def the_weight_of_a_block_behind_it(run: Run) -> None:
    """A head that computes with the matrix of a block, which has run."""

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(super().forward(x), self.blocks[0].up.weight)

    run.train(run.engine(Reads()))


def the_weight_of_a_block_before_it(run: Run) -> None:
    """The same before the block runs, in two micro-batches."""

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.blocks[2].scale + self.blocks[1].down.bias)

    run.train(run.engine(Reads(), gradient_accumulation_steps=2), steps=4)


def a_penalty_in_the_forward(run: Run) -> None:
    """A loss that adds the squares of all weights, as some models do themselves."""

    class Penalized(Net):
        def forward(self, x: Tensor) -> Tensor:
            penalty = sum(p.square().sum() for p in self.blocks.parameters())
            return super().forward(x).square().mean() + 1e-3 * penalty

    run.train(run.engine(Penalized()))


def a_block_that_reads_another(run: Run) -> None:
    """Block 1 uses the weight of block 0 by a reference that is no submodule."""
    net = Net()

    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(F.linear(x, other[0].up.weight), other[0].down.weight)

    torch.manual_seed(3)
    net.blocks[1] = Reads()
    other = [net.blocks[0]]
    run.train(run.engine(net))


def a_bias_that_is_returned(run: Run) -> None:
    """A layer that returns its bias beside its output, for its caller to add: Megatron's `skip_bias_add`."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return F.linear(x, self.linear.weight), self.linear.bias

    class Adds(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x, bias = block(x)
                x = torch.tanh(x + bias)
            return self.head(x)

    run.train(run.engine(Adds(Skips)))


def a_registered_parameter(run: Run) -> None:
    """`zero.register_external_parameter`, as the documentation says."""

    class Registers(Net):
        def __init__(self) -> None:
            super().__init__()
            register(self, self.blocks[1].up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(super().forward(x), self.blocks[1].up.weight)

    register = run.deepspeed.zero.register_external_parameter
    run.train(run.engine(Registers()))


def a_weight_outside_in_evaluation(run: Run) -> None:
    """Without gradients, and then with."""

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(super().forward(x), self.blocks[0].up.weight)

    engine = run.engine(Reads())
    engine.eval()
    with torch.no_grad():
        run.tell("evaluation", square(engine(run.data(9))))
    engine.train()
    run.train(engine)


def a_weight_outside_under_checkpointing(run: Run) -> None:
    """In a function that is recomputed in the backward."""

    class Recomputed(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.into(x)
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
            return checkpoint(lambda h: F.linear(h, self.blocks[0].up.weight).tanh(), h, use_reentrant=False)

    run.train(run.engine(Recomputed()))


# --- blocks that nobody calls -------------------------------------------------------------------------------


def a_list_of_dicts(run: Run) -> None:
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

    run.train(run.engine(Dicts()))


def nested_lists(run: Run) -> None:
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

    run.train(run.engine(Lists()))


def a_dict_of_lists(run: Run) -> None:
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

    run.train(run.engine(Towers()))


def other_methods_of_a_block(run: Run) -> None:
    """`block.encode(x)` and `block.decode(x)`, and no `block(x)`; a bare parameter is used in one of them."""

    class Auto(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.into(x)
            for block in self.blocks:
                h = h + block.decode(block.encode(h))
            return self.head(h)

    run.train(run.engine(Auto()))


def the_parts_of_a_block(run: Run) -> None:
    """The parent calls what is in a block; the block is a holder."""

    class Parts(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.into(x)
            for block in self.blocks:
                h = h + block.down(F.gelu(block.up(h))) * block.scale
            return self.head(h)

    run.train(run.engine(Parts(), gradient_accumulation_steps=2), steps=4)


def the_forward_of_a_block(run: Run) -> None:
    """`block.forward(x)`, past its hooks."""

    class Direct(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.into(x)
            for block in self.blocks:
                h = block.forward(h)
            return self.head.forward(h)

    run.train(run.engine(Direct()))


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
            h = self.into(x)
            for block in self.blocks:
                h = block(h)
            return h

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x))

    engine = run.engine(Features())
    run.train(engine, steps=1)
    with torch.no_grad():
        run.tell("features", engine.module.features(run.data(8)))
    run.train(engine, steps=1, first=1)


BELOW_3 = (0, 1, 2)

SCRIPTS = (
    Script(the_weight_of_a_block_behind_it),
    Script(the_weight_of_a_block_before_it),
    Script(a_penalty_in_the_forward, alike=BELOW_3, why="its backward meets an empty parameter, and raises"),
    Script(a_block_that_reads_another),
    Script(a_bias_that_is_returned),
    Script(a_registered_parameter),
    Script(a_weight_outside_in_evaluation),
    Script(a_weight_outside_under_checkpointing),
    Script(a_list_of_dicts),
    Script(nested_lists),
    Script(a_dict_of_lists, alike=BELOW_3, why="its trace is of the other tower: other losses"),
    Script(other_methods_of_a_block),
    Script(the_parts_of_a_block),
    Script(the_forward_of_a_block),
    Script(a_part_that_is_called_from_outside),
    Script(another_method_of_the_model),
)
