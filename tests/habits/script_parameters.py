"""Scripts about parameters: outside of their block, in other memory, and in the pieces of `zero.Init`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.habits.loop import Habit, Loop, habits_of
from tests.habits.networks import Net, Seeded, fit, square


class WeightOfABlock(Seeded):
    """A model that computes a head with the matrix of a block that has run."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Net.forward(self, x), self.blocks[1].up.weight)


def a_registered_parameter(loop: Loop) -> None:
    """Use a weight outside of its block as the documentation does, without gradients, and then with."""
    net = WeightOfABlock()
    loop.deepspeed.zero.register_external_parameter(net, net.blocks[1].up.weight)
    engine = loop.train(net)
    engine.eval()
    with torch.no_grad():
        loop.see("evaluation", square(engine(loop.data(9))))
    engine.train()
    fit(loop, engine, steps=3)


# --- other memory for `.data` -------------------------------------------------------------------------------


def averages_that_are_evaluated(loop: Loop) -> None:
    """An average of the weights takes their place for an evaluation, and the weights are put back."""
    engine = loop.train(Seeded())
    named = dict(engine.module.named_parameters())
    shadow = {name: p.data.clone() for name, p in named.items()}
    for step in range(3):
        fit(loop, engine, steps=1, seed=step)
        shadow = {name: (0.1 * p.data + 0.9 * shadow[name]).clone() for name, p in named.items()}
        held = {name: p.data for name, p in named.items()}
        for name, p in named.items():
            p.data = shadow[name]
        with torch.no_grad():
            loop.see("average", square(engine(loop.data(9))))
        for name, p in named.items():
            p.data = held[name]


def an_attack_that_is_undone(loop: Loop) -> None:
    """FGM's: weights change for a second loss, and a copy of the old ones is assigned before the step."""
    engine = loop.train(Seeded(), gradient_accumulation_steps=2)
    weight = engine.module.into.weight
    for step in range(3):
        fit(loop, engine, steps=1, seed=step)
        before = weight.data.clone()
        weight.data.add_(0.1)
        engine.backward(square(engine(loop.data(step))))
        weight.data = before
        engine.step()


# --- models of `zero.Init`, before there is an engine -------------------------------------------------------


def made_in_pieces(script: Loop) -> Seeded:
    """Make a model in pieces. Not a script: those have a `loop`."""
    with script.deepspeed.zero.Init(config_dict_or_path=script.config()):
        return Seeded()


CASTS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda net: net.half(),
    "type": lambda net: net.type(torch.float16),
    "device and dtype": lambda net: net.to("cpu", torch.bfloat16),
    "twice": lambda net: net.half().float(),
    "a part": lambda net: net.get_submodule("blocks.1").bfloat16(),
}


def models_that_are_cast(loop: Loop) -> None:
    """Call `.half()`, `.to(dtype)`, `.float()` on the model, before `initialize`."""
    for name, cast in CASTS.items():
        net = made_in_pieces(loop)
        cast(net)
        loop.see(name, loop.weights(net))


def contexts_in_contexts(loop: Loop) -> None:
    """Nest `GatheredParameters`: gathered values stay so under any `modifier_rank`."""
    gathered, net = loop.deepspeed.zero.GatheredParameters, made_in_pieces(loop)
    head, last = net.head.weight, dist.get_world_size() - 1
    with gathered(head, modifier_rank=0):
        with gathered(list(net.parameters())):
            loop.see("inside", head.detach())
        if loop.rank == 0:
            head.data.fill_(0.5)
        with gathered([head, net.into.weight], modifier_rank=last):
            if loop.rank == last:
                head.data.mul_(0.25)
                net.into.weight.data.zero_()
        if loop.rank == 0:
            head.data.fill_(0.125)
    fit(loop, loop.train(net), steps=3)


def a_part_that_is_copied(loop: Loop) -> None:
    """Copy a module by `copy.deepcopy`, as PEFT does for `modules_to_save`, and train the copy."""
    net = made_in_pieces(loop)
    other = copy.deepcopy(net)
    net.head = copy.deepcopy(net.head)
    for model in (net, other):
        engine = loop.train(model)
        fit(loop, engine)
        loop.end(engine)
        loop.see("weights", loop.weights(model))
    fit(loop, loop.train(copy.deepcopy(other)), steps=1, seed=2)


def what_a_parameter_says(loop: Loop) -> None:
    """Read attributes that Lightning, PEFT and others read, before `initialize` and after it."""
    net = made_in_pieces(loop)
    for turn in range(2):
        loop.see("said", {name: _said(loop, parameter) for name, parameter in net.named_parameters()})
        if turn == 0:
            loop.train(net)


def _said(loop: Loop, parameter: Any) -> list[Any]:
    """Return the numbers of a parameter, and its values from the slices of all ranks."""
    ranks, numel, shape = dist.get_world_size(), math.prod(parameter.shape), list(parameter.shape)
    if loop.plain:
        part = math.ceil(numel / ranks)
        sizes = [part, part * ranks, part * ranks - numel]
        return [shape, numel, *sizes, False, False, loop.rank, ranks, ranks, parameter.detach().view(-1)]
    held: list[Any] = [None] * ranks
    flat = parameter.detach() if parameter.ds_tensor is None else parameter.ds_tensor.clone()
    dist.all_gather_object(held, flat.view(-1))
    assert parameter.ds_summary()["ds_numel"] == parameter.ds_numel
    group = parameter.ds_process_group
    return [
        list(parameter.ds_shape), parameter.ds_numel,
        parameter.partition_numel(), parameter.aligned_size(), parameter.padding_size(),
        parameter.ds_persist, parameter.is_external_param,
        parameter.ds_zero_partition_rank, parameter.ds_zero_partition_world_size, dist.get_world_size(group),
        torch.cat(held)[: parameter.ds_numel],
    ]  # fmt: skip


BELOW_3, THREE = (0, 1, 2), (3,)

HABITS = habits_of(
    globals(),
    Habit(averages_that_are_evaluated, stages=BELOW_3),
    Habit(an_attack_that_is_undone, stages=BELOW_3),
    Habit(models_that_are_cast, stages=THREE, alike=(), why="they keep their dtype"),
    Habit(contexts_in_contexts, stages=THREE, alike=(), why="they may not overlap"),
    Habit(what_a_parameter_says, stages=THREE),
    Habit(a_part_that_is_copied, stages=THREE, alike=(), why="a copy has no values"),
)
