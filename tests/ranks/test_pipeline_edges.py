"""Unusual data, loops, models and recomputed layers in a pipeline: right numbers, or one error by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.numerics.networks import GPT
from tests.numerics.runs import config, diff, gradients
from tests.numerics.test_pipelines import COUNT, LAYERS, PARTS, data, pipeline
from tests.ranks.harness import on_ranks
from tests.ranks.ways import WAYS
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError, RankError, ZerodriftError
from zerodrift.pipeline.cut import Parts

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
    changed = [*tokens[:2], tokens[2] + other, tokens[3]]
    same = "`micro_batches`: must be the same on every stage"
    apart = "micro-batch {}.*on rank 0, one with different contents on rank 2"
    weights: list[Any] = [2.0 if other else 1.0] * COUNT
    for act, told in (
        (lambda: engine.train_batch(changed), same + ".*" + apart.format(2)),
        (lambda: engine.evaluate(changed), same),
        (lambda: engine.train_batch(tokens[::-1] if other else tokens), same + ".*" + apart.format(0)),
        (lambda: engine.train_batch(tokens, weights), "`weights`: must be the same on every stage"),
        (lambda: engine.train_batch(tokens, [1.0, float("nan"), 1.0, 1.0]), "must be 4 finite numbers"),
    ):
        with pytest.raises(ModelError, match=told):
            act()
    engine.train_batch(tokens)  # and goes on
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS), IN_A_BATCH)
    with pytest.raises(ModelError, match=same):
        engine.train_batch([{"tokens": each, "scale": 1.0 + other} for each in tokens])


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
    for number, (schedule, weights) in enumerate(WAYS):
        later, model = number in (4, 5), GPT(LAYERS, tied=False)
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

    def shortens(layer: Any, x: torch.Tensor, batch: Any) -> torch.Tensor:
        return layer(x)[: int(x.detach().sum() > 0) + 1]

    def maps(layer: Any, x: torch.Tensor, batch: Any) -> Any:
        return {"x": layer(x)}

    for each, second, told in (
        (shortens, -1.0, shapes),
        (maps, 1.0, "must be a tensor or a tuple of tensors"),
    ):
        engine = stack(block, replace(STACK, each=each))
        if engine.mesh.rank() == 0:
            kind, told = ModelError, f"^`hidden`: {told}"
        else:
            kind, told = RankError, "^`pipeline`: .*got ModelError: `hidden`.* on rank 0"
        with pytest.raises(kind, match=f"(?s){told}"):
            engine.train_batch([torch.ones(2, 8), second * torch.ones(2, 8)])


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


Way = tuple[str, "str | None"]


def whole(layer: Any, hidden: torch.Tensor, batch: Any) -> Any:
    return checkpoint(layer, hidden, use_reentrant=False)


def half(layer: Any, hidden: torch.Tensor, batch: Any) -> Any:
    """Recompute the second half of a user's own layer."""
    hidden = hidden + layer.attention(layer.norm1(hidden))
    return checkpoint(lambda x: x + layer.mlp(layer.norm2(x)), hidden, use_reentrant=False)


def reentrant(layer: Any, hidden: torch.Tensor, batch: Any) -> Any:
    return checkpoint(layer, hidden.requires_grad_(), use_reentrant=True)


HOW = {"not": PARTS.each, "whole": whole, "half": half, "reentrant": reentrant}


def engine_of(how: str, stage: int, way: Way, keep: str, mode: str) -> Engine:
    written = config(stage, mode, COUNT, sharding={"keep_gathered": keep})
    return pipeline(written, *way, GPT(LAYERS, tied=False), replace(PARTS, each=HOW[how]))


def run_step(how: str, *what: Any) -> tuple[tuple[float, ...], dict[str, torch.Tensor], int]:
    """Return losses, gradients, and forwards of the first product of an MLP, recomputations included."""
    engine = engine_of(how, *what)
    rank = engine.mesh.rank("data")
    engine.train_batch(data(0, rank))
    calls: list[int] = []
    pieces = engine.executor.forwards
    layers = [layer for piece in pieces for layer in piece.module.layers if hasattr(layer, "mlp")]
    for layer in layers:
        layer.mlp.up.register_forward_pre_hook(lambda *_: calls.append(1))
    losses = engine.accumulate(data(1, rank))
    found = losses, gradients(engine), len(calls) // (COUNT * len(layers))
    engine.step()
    return found


def compare(way: Way, hows: list[str], stage: int, keep: str, mode: str) -> None:
    losses, plain, forwards = run_step("not", stage, way, keep, mode)
    assert forwards == 1
    for how in hows:
        again, found, forwards = run_step(how, stage, way, keep, mode)
        assert again == losses and diff(plain, found) == [], (way, how)
        # Autograd's second pass recomputes for every group of weights that it comes to.
        assert forwards == 2 or (way[1] == "autograd" and forwards > 2), (way, how, forwards)


@on_ranks(2)
def test_gradients_are_the_same_bits_and_counted_once() -> None:
    compare(("dualpipev", "queue"), ["whole"], 0, "step", "fp32")


@on_ranks(4, timeout=120)
def test_gradients_of_sliced_parameters_that_are_gathered_for_each_part_too() -> None:
    compare(("zbv", "queue"), ["half"], 3, "micro-batch", "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@on_ranks(4, timeout=240)
def test_every_schedule(way: Way) -> None:
    for stage, mode in ((0, "bf16"), (3, "fp32")):
        compare(way, ["whole", "half"], stage, "step", mode)


@on_ranks(2)
def test_a_backward_inside_of_a_backward_is_refused_by_name() -> None:
    for schedule in ("1f1b", "zbv"):
        engine = engine_of("reentrant", 0, (schedule, None), "step", "fp32")
        with pytest.raises(ZerodriftError, match="`checkpoint`: must be called with `use_reentrant=False`"):
            engine.train_batch(data(0, 0))


@on_ranks(2)
def test_compiled_blocks_are_refused_where_backwards_are_divided() -> None:
    model = GPT(LAYERS, tied=False)
    model.layers[0].compile(backend="aot_eager")
    with pytest.raises(ZerodriftError, match=r"`layers\.0`: must not be compiled under `zbv`"):
        pipeline(config(0, "fp32", COUNT), "zbv", None, model)
