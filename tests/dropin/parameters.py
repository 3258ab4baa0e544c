"""Scripts that use parameters outside of their block, or give them other memory."""

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
    """Compute a head with the matrix of a block that has run."""
    return F.linear(Net.forward(self, x), self.blocks[0].up.weight)


def a_penalty_in_the_forward(self: Any, x: Tensor) -> Tensor:
    """Add the squares of all weights to the loss, as some models do themselves."""
    penalty = sum(p.square().sum() for p in self.blocks.parameters())
    return Net.forward(self, x).square().mean() + 1e-3 * penalty


def a_weight_outside_under_checkpointing(self: Any, x: Tensor) -> Tensor:
    """Use a weight in a function that is recomputed in the backward."""
    h = _stacked(self, x, lambda block, h: checkpoint(block, h, use_reentrant=False))
    return checkpoint(lambda h: F.linear(h, self.blocks[0].up.weight).tanh(), h, use_reentrant=False)


# --- models -----------------------------------------------------------------------------------------------


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.linear.weight), self.linear.bias


def a_bias_that_is_returned() -> nn.Module:
    """Make a layer that returns its bias for its caller to add: Megatron's skip_bias_add."""

    class Adds(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x, bias = block(x)
                x = torch.tanh(x + bias)
            return self.head(x)

    return Adds(Skips)


# --- whole scripts ----------------------------------------------------------------------------------------


def a_registered_parameter(run: Run) -> None:
    """Call `zero.register_external_parameter`, as the documentation does."""
    net = reads(lambda self, x: F.linear(Net.forward(self, x), self.blocks[1].up.weight))()
    run.deepspeed.zero.register_external_parameter(net, net.blocks[1].up.weight)
    run.train(run.engine(net))


def a_weight_outside_in_evaluation(run: Run) -> None:
    """Use a weight outside of its block without gradients, and then with."""
    engine = run.engine(reads(the_weight_of_a_block_behind_it)())
    engine.eval()
    with torch.no_grad():
        run.tell("evaluation", square(engine(run.data(9))))
    engine.train()
    run.train(engine)


def trains(make: Callable[[], nn.Module], name: str) -> Callable[[Run], None]:
    """Return a script that trains a model."""

    def script(run: Run) -> None:
        run.train(run.engine(make()))

    script.__name__ = name
    return script


# --- other memory for `.data` -------------------------------------------------------------------------------


def averages_that_are_evaluated(run: Run) -> None:
    """An average of the weights takes their place for an evaluation, and the weights are put back."""
    engine = run.engine(Net())
    named = dict(engine.module.named_parameters())
    shadow = {name: p.data.clone() for name, p in named.items()}
    for step in range(3):
        run.train(engine, 1, first=step)
        shadow = {name: (0.1 * p.data + 0.9 * shadow[name]).clone() for name, p in named.items()}
        held = {name: p.data for name, p in named.items()}
        for name, p in named.items():
            p.data = shadow[name]
        with torch.no_grad():
            run.tell("average", square(engine(run.data(9))))
        for name, p in named.items():
            p.data = held[name]


def a_momentum_encoder(run: Run) -> None:
    """MoCo's: `key.data = key.data * m + query.data * (1 - m)`, of parameters that are not trained."""
    net = Net()
    net.blocks[0].requires_grad_(False)
    engine = run.engine(net)
    for step in range(3):
        for key, query in zip(net.blocks[0].parameters(), net.blocks[1].parameters(), strict=True):
            key.data = key.data * 0.5 + query.data * 0.5
        run.train(engine, 1, first=step)


def an_attack_that_is_undone(run: Run) -> None:
    """FGM's: weights change for a second loss, and a copy of the old ones is assigned before the step."""
    engine = run.engine(Net(), gradient_accumulation_steps=2)
    weight = engine.module.into.weight
    for step in range(3):
        run.train(engine, 1, first=step)
        before = weight.data.clone()
        weight.data.add_(0.1)
        engine.backward(square(engine(run.data(step))))
        weight.data = before
        engine.step()


BELOW_3 = (0, 1, 2)
FORWARDS = {
    the_weight_of_a_block_behind_it: {},
    a_penalty_in_the_forward: {"alike": BELOW_3, "why": "its backward meets an empty parameter, and raises"},
    a_weight_outside_under_checkpointing: {},
}
"""Forward of a `Net` -> DeepSpeed's result. Other ways to call blocks and parts of them, without names of
DeepSpeed's, are habits of any loop: `tests/habits/modules.py`."""

SCRIPTS = (
    *(Script(trains(reads(forward), forward.__name__), **differs) for forward, differs in FORWARDS.items()),
    Script(trains(a_bias_that_is_returned, "a_bias_that_is_returned")),
    Script(a_registered_parameter),
    Script(a_weight_outside_in_evaluation),
    Script(averages_that_are_evaluated, stages=BELOW_3),
    Script(a_momentum_encoder, stages=BELOW_3),
    Script(an_attack_that_is_undone, stages=BELOW_3),
)
