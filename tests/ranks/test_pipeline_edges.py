"""Unusual data, loops and models in a pipeline give the right numbers, or one error that names the cause."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT
from tests.numerics.runs import config, diff, gradients
from tests.numerics.test_pipelines import COUNT, LAYERS, PARTS, data, pipeline
from tests.ranks.harness import on_ranks, run_ranks
from tests.ranks.ways import WAYS
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError, RankError
from zerodrift.pipeline.cut import Parts
from zerodrift.pipeline.run import checksum


@dataclass
class Sample:
    tokens: torch.Tensor
    scale: float = 1.0


def changed(step: Any) -> list[Any]:
    """Return the same micro-batches with a change in one of them."""
    other = [tokens.clone() for tokens in step]
    other[2][0, 3] += 1
    return other


IN_A_BATCH = Parts(
    "layers",
    before=lambda model, batch: model.embed(batch["tokens"]),
    after=lambda model, hidden, batch: PARTS.after(model, hidden, batch["tokens"]) * batch["scale"],
)


@on_ranks(4)
def test_ranks_of_one_pipeline_with_different_data_are_an_error_on_all_ranks() -> None:
    """One of two pipelines of two stages has a rank with other tokens, order, weights or numbers."""
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS))
    other = engine.mesh.rank("pipeline") == 1 and engine.mesh.rank("data") == 0
    tokens = data(0, engine.mesh.rank("data"))
    same = "`micro_batches`: must be the same on every stage"
    apart = "micro-batch {}.*on rank 0, one with other contents on rank 2"
    weights: list[Any] = [2.0 if other else 1.0] * COUNT
    for act, told in (
        (lambda: engine.train_batch(changed(tokens) if other else tokens), same + ".*" + apart.format(2)),
        (lambda: engine.evaluate(changed(tokens) if other else tokens), same),
        (lambda: engine.train_batch(tokens[::-1] if other else tokens), same + ".*" + apart.format(0)),
        (lambda: engine.train_batch(tokens, weights), "`weights`: must be the same on every stage"),
        (lambda: engine.train_batch(tokens, [1.0, float("nan"), 1.0, 1.0]), "must be 4 finite numbers"),
        (lambda: engine.train_batch(tokens, ["x"] * COUNT), "must be 4 finite numbers"),  # type: ignore[list-item]
    ):
        with pytest.raises(ModelError, match=told):
            act()
    engine.train_batch(tokens)  # and goes on
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS), IN_A_BATCH)
    with pytest.raises(ModelError, match=same):
        engine.train_batch([{"tokens": each, "scale": 1.0 + other} for each in tokens])


def test_a_checksum_sees_every_value_and_no_order_of_keys() -> None:
    tokens = torch.arange(12).view(3, 4)
    one: list[Any] = [
        tokens, tokens.t(), tokens.clone().t().contiguous(), tokens.float(), tokens.view(4, 3),
        tokens.flip(0), tokens.bfloat16(), {"a": tokens}, {"b": tokens}, [tokens],
        (tokens, 1), (tokens, 2), (tokens, "1"),
        Sample(tokens), Sample(tokens, 2.0), None, torch.tensor([float("nan")]), torch.empty(0),
    ]  # fmt: skip
    sums = [checksum(each) for each in one]
    assert sums[1] == sums[2]
    assert len(set(sums)) == len(one) - 1
    for mapping in (OrderedDict, UserDict, dict):
        pair = mapping({"x": tokens, "y": 1}), mapping({"y": 1, "x": tokens})
        assert checksum(pair[0]) == checksum(pair[1]) == checksum({"x": tokens, "y": 1})


def hooks_on(model: nn.Module) -> None:
    """Put hooks on weights: masks, clipping, and hooks after accumulation."""
    for name, parameter in model.named_parameters():
        if "up.weight" in name:
            parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        elif "down.weight" in name:
            mask = torch.arange(parameter.numel()).view_as(parameter) % 2

            def masked(leaf: torch.Tensor, mask: torch.Tensor = mask) -> None:
                assert leaf.grad is not None
                leaf.grad.mul_(mask.to(leaf.grad.dtype))

            parameter.register_post_accumulate_grad_hook(masked)
        elif "norm" in name:
            parameter.register_hook(lambda grad: grad * 2)


@on_ranks(2, timeout=120)
def test_hooks_on_weights_hold_under_every_schedule() -> None:
    """Hooks are put on before the first step, or after it."""
    plain = GPT(LAYERS, tied=False)
    hooks_on(plain)
    for tokens in data(0, 0):
        plain(tokens).backward()
    alone = {name: value.grad / COUNT for name, value in plain.named_parameters() if value.grad is not None}
    for later in (False, True):
        for schedule, weights in WAYS if not later else WAYS[4:6]:
            model = GPT(LAYERS, tied=False)
            if not later:
                hooks_on(model)
            engine = pipeline(config(0, "fp32", COUNT), schedule, weights, model)
            if later:
                engine.accumulate(data(0, 0))
                engine.zero_grad()
                hooks_on(engine.module)
            engine.accumulate(data(0, 0))
            wrong = diff(alone, gradients(engine))
            assert wrong == [], (schedule, weights, later, wrong)


class Shortens(nn.Module):
    """A layer that shortens its input by an amount in the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made[: int(x.detach().sum() > 0) + 1]


STACK = Parts("", before=lambda model, x: x, after=lambda model, hidden, x: hidden.square().mean())


def stack(layer: Callable[[], nn.Module], parts: Parts = STACK, count: int = 2) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(count)))
    return pipeline(config(0, "fp32", count), "1f1b", None, model, parts, stages=count, micro_batches=count)


def block() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8)))


@on_ranks(2)
def test_a_piece_checks_what_it_sends() -> None:
    shapes = "must have the same shapes and dtypes in every micro-batch.*"
    shapes += r"\[1, 8\] torch.float32 from piece 0 for micro-batch 1, and \[2, 8\] torch.float32 before"
    mapping = Parts("", STACK.before, each=lambda layer, x, b: {"x": layer(x)}, after=STACK.after)  # type: ignore[arg-type]
    for engine, second, told in (
        (stack(Shortens), -1.0, shapes),
        (stack(block, mapping), 1.0, "must be a tensor or a tuple of tensors"),
    ):
        if engine.mesh.rank() == 0:
            kind, told = ModelError, f"^`hidden`: {told}"
        else:
            kind, told = RankError, "^`pipeline`: .*got ModelError: `hidden`.* on rank 0"
        with pytest.raises(kind, match=f"(?s){told}"):
            engine.train_batch([torch.ones(2, 8), second * torch.ones(2, 8)])


def hooked(tree: nn.Module) -> list[str]:
    """Return the modules and parameters that have a hook."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    modules = [n for n, each in tree.named_modules() if any(getattr(each, kind) for kind in kinds)]
    return modules + [name for name, each in tree.named_parameters() if each._post_accumulate_grad_hooks]


@on_ranks(2)
def test_the_loss_of_a_step_has_its_weights_and_destroy_leaves_no_hook() -> None:
    """Hooks of boundaries are removed too, under a schedule that defers weight gradients."""
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS))
    plain = engine.train_batch(data(0, 0))
    assert plain.loss == sum(plain.losses) / COUNT
    weights = [0.5, 1.0, 1.5, 3.0]
    weighted = engine.train_batch(data(1, 0), weights)
    assert weighted.loss == sum(w * loss for w, loss in zip(weights, weighted.losses, strict=True)) / COUNT
    rules = [{"match": "*norm*", "pin": "fp32"}]
    other = pipeline(config(0, "bf16", COUNT, precision={"rules": rules}), "zbv", "queue", GPT(LAYERS))
    other.train_batch(data(0, 0))
    for each in (engine, other):
        tree = each.module
        each.destroy()
        assert hooked(tree) == [], hooked(tree)


class Armed(nn.Module):
    """A module that calls its armed function in each forward, and scales its output by the result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))
        self.act: Callable[[], Any] = lambda: 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.act()
        made: torch.Tensor = self.inner(x)
        return made * scale


STEP = [torch.ones(2, 8)] * 2


@on_ranks(2)
def test_dropout_differs_between_stages_micro_batches_and_steps() -> None:
    engine, masks = stack(Armed), []

    def drop() -> torch.Tensor:
        masks.append(torch.nn.functional.dropout(torch.ones(64), 0.5) > 0)
        return masks[-1].float().mean()

    next(module for module in engine.module.modules() if isinstance(module, Armed)).act = drop
    torch.manual_seed(7)
    for _ in range(2):
        engine.train_batch(STEP)
    drawn = torch.rand(4)
    del masks[0]  # the first learns shapes
    every = engine.comm.all_gather_object((masks, drawn))
    assert len({tuple(mask.tolist()) for masks, _ in every for mask in masks}) == 8
    assert torch.equal(every[0][1], every[1][1]), "ranks that were seeded alike stay so"
    engine = stack(block)
    torch.manual_seed(7)
    engine.train_batch(STEP)
    alike = torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(7)))
    assert alike, "what draws nothing leaves the generator alone"


def test_a_rank_that_is_killed_ends_the_others_with_a_rank_error() -> None:
    """The middle one of three stages is killed."""
    first, _, last = run_ranks(ends_after_a_kill, 3, dying=[1])
    assert first.startswith("`") and last.startswith("`"), (first, last)


def ends_after_a_kill() -> str:
    engine, batches = stack(block, count=3), [torch.ones(2, 8)] * 3
    engine.train_batch(batches)
    if engine.mesh.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankError) as caught:
        engine.train_batch(batches)
    return str(caught.value)
