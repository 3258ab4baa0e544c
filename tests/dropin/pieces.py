"""Scripts that use models of `zero.Init`, whose parameters are in pieces, before there is an engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dropin.parameters import Net
from tests.dropin.script import Run, Script


def in_pieces(run: Run) -> Net:
    with run.deepspeed.zero.Init(config_dict_or_path=run.config()):
        return Net()


def whole(run: Run, net: nn.Module) -> dict[str, list[object]]:
    """Return the dtype and the values of each parameter."""
    with run.deepspeed.zero.GatheredParameters(list(net.parameters())):
        return {name: [str(p.dtype), p.detach().float()] for name, p in net.named_parameters()}


CASTS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda net: net.half(),
    "bfloat16": lambda net: net.to(torch.bfloat16),
    "double": lambda net: net.double(),
    "float": lambda net: net.float(),
    "type": lambda net: net.type(torch.float16),
    "device and dtype": lambda net: net.to("cpu", torch.bfloat16),
    "twice": lambda net: net.half().float(),
    "a part": lambda net: net.get_submodule("blocks.1").bfloat16(),
}


def models_that_are_cast(run: Run) -> None:
    """Call `.half()`, `.to(dtype)`, `.float()` on the model, before `initialize`."""
    for name, cast in CASTS.items():
        net = in_pieces(run)
        cast(net)
        run.tell(name, whole(run, net))


def a_model_that_is_cast_and_trained(run: Run) -> None:
    """Round the model once to bf16, and train in fp32 after that."""
    engine = run.engine(in_pieces(run).to(torch.bfloat16).float())
    run.train(engine)


def models_that_are_not_cast(run: Run) -> None:
    """Move the model to a device, or to its own dtype, with gradients or without."""
    net = in_pieces(run)
    assert net.to("cpu").float().to(torch.float32).cpu().eval().train().requires_grad_(True) is net
    net.zero_grad()
    run.train(run.engine(net))


def contexts_in_contexts(run: Run) -> None:
    """Nest `GatheredParameters`: gathered values stay so under any `modifier_rank`."""
    gathered, net = run.deepspeed.zero.GatheredParameters, in_pieces(run)
    head, last = net.head.weight, dist.get_world_size() - 1
    with gathered(head, modifier_rank=0):
        with gathered(list(net.parameters())):
            run.tell("inside", head.detach())
        if run.rank == 0:
            head.data.fill_(0.5)
        with gathered([head, net.into.weight], modifier_rank=last):
            if run.rank == last:
                head.data.mul_(0.25)
                net.into.weight.data.zero_()
        if run.rank == 0:
            head.data.fill_(0.125)
    run.train(run.engine(net))


def is_it_there(run: Run) -> None:
    """Read `ds_status` inside and outside of `GatheredParameters`, before `initialize` and after it."""
    net = in_pieces(run)
    for turn in range(2):
        parameters: list[Tensor] = [net.head.weight, net.into.weight]
        for names in (parameters[:1], parameters):
            with run.deepspeed.zero.GatheredParameters(names):
                told = [_status(run, p, any(p is held for held in names)) for p in parameters]
                run.tell("inside", told)
            run.tell("outside", [_status(run, p, False) for p in parameters])
        if turn == 0:
            run.engine(net)


def _status(run: Run, parameter: Tensor, gathered: bool) -> str:
    if run.is_plain:
        return "AVAILABLE" if gathered else "NOT_AVAILABLE"
    return parameter.ds_status.name  # type: ignore[attr-defined, no-any-return]


def a_part_that_is_copied(run: Run) -> None:
    """Copy a module by `copy.deepcopy`, as PEFT does for `modules_to_save`, and train the copy."""
    net = in_pieces(run)
    other = copy.deepcopy(net)
    net.head = copy.deepcopy(net.head)
    for model in (net, other):
        engine = run.engine(model)
        run.train(engine, 2)
        run.end(engine)
        run.tell("weights", run.weights(model))
    run.train(run.engine(copy.deepcopy(other)), 1, first=2)


def what_a_parameter_says(run: Run) -> None:
    """Read attributes that Lightning, PEFT and others read, before `initialize` and after it."""
    net = in_pieces(run)
    for turn in range(2):
        run.tell("said", {name: _said(run, parameter) for name, parameter in net.named_parameters()})
        if turn == 0:
            run.engine(net)


def _said(run: Run, parameter: Any) -> list[Any]:
    """Return the numbers of a parameter, and its values from the slices of all ranks."""
    ranks, numel, shape = dist.get_world_size(), math.prod(parameter.shape), list(parameter.shape)
    if run.is_plain:
        part = math.ceil(numel / ranks)
        sizes = [part, part * ranks, part * ranks - numel]
        return [shape, numel, *sizes, False, False, run.rank, ranks, ranks, parameter.detach().view(-1)]
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


def parameters_of_nobody(run: Run) -> None:
    """Pass None, nothing, and whole tensors and parameters to `GatheredParameters`."""
    whole_one = nn.Parameter(torch.ones(2))
    for given in (None, [], [torch.ones(2)], whole_one, iter([whole_one])):
        with run.deepspeed.zero.GatheredParameters(given):
            run.tell("there", whole_one.detach())


THREE = (3,)

SCRIPTS = (
    Script(models_that_are_cast, stages=THREE, alike=(), why="they keep their dtype"),
    Script(a_model_that_is_cast_and_trained, stages=THREE, alike=(), why="nothing is rounded"),
    Script(models_that_are_not_cast, stages=THREE),
    Script(contexts_in_contexts, stages=THREE, alike=(), why="they may not overlap"),
    Script(is_it_there, stages=THREE),
    Script(what_a_parameter_says, stages=THREE),
    Script(a_part_that_is_copied, stages=THREE, alike=(), why="a copy has no values"),
    Script(parameters_of_nobody),
)
