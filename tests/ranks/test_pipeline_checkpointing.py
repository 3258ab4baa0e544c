"""Recomputed and compiled layers in a pipeline have the same bits, and count once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.numerics.networks import GPT
from tests.numerics.runs import config, diff, gradients
from tests.numerics.test_pipelines import COUNT, LAYERS, PARTS, data, pipeline
from tests.ranks.harness import on_ranks
from tests.ranks.ways import WAYS
from zerodrift.engine.engine import Engine
from zerodrift.errors import ZerodriftError

Way = tuple[str, "str | None"]


def whole(layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    """Recompute the layer."""
    out: torch.Tensor = checkpoint(layer, hidden, use_reentrant=False)
    return out


def half(layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    """Recompute the second half of a user's own layer."""
    hidden = hidden + layer.attention(layer.norm1(hidden))
    out: torch.Tensor = checkpoint(lambda x: x + layer.mlp(layer.norm2(x)), hidden, use_reentrant=False)
    return out


def nested(layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    """Recompute the half in the layer."""
    out: torch.Tensor = checkpoint(half, layer, hidden, batch, use_reentrant=False)
    return out


def reentrant(layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    out: torch.Tensor = checkpoint(layer, hidden.requires_grad_(), use_reentrant=True)
    return out


HOW = {"not": PARTS.each, "whole": whole, "half": half, "nested": nested, "reentrant": reentrant}


Seen = tuple[tuple[float, ...], dict[str, torch.Tensor], int]
"""Losses, gradients, and forwards of the first product of an MLP, recomputations included."""


def engine_of(how: str, stage: int, way: Way, keep: str, mode: str) -> Engine:
    written = config(stage, mode, COUNT, sharding={"keep_gathered": keep})
    return pipeline(written, *way, GPT(LAYERS, tied=False), replace(PARTS, each=HOW[how]))


def run_step(how: str, *what: Any) -> Seen:
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
        most = 99 if way[1] == "autograd" else 3 if how == "nested" else 2
        assert 2 <= forwards <= most, (way, how, forwards)


@pytest.mark.parametrize("way", [("zbv", "queue"), ("dualpipev", "queue")])
@on_ranks(2)
def test_gradients_are_the_same_bits_and_counted_once(way: Way) -> None:
    compare(way, ["whole"], 0, "step", "fp32")


@on_ranks(4, timeout=120)
def test_gradients_of_sliced_parameters_that_are_gathered_for_each_part_too() -> None:
    compare(("zbv", "queue"), ["half"], 3, "micro-batch", "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("stage", "keep", "world"), [(0, "step", 2), (3, "step", 4), (3, "micro-batch", 4)])
@on_ranks("world", timeout=240)
def test_every_schedule(way: Way, stage: int, keep: str, world: int) -> None:
    if keep == "micro-batch" and way[1] == "autograd":
        return  # refused: what autograd would regather in its second pass is gone
    for mode in ("fp32", "bf16"):
        compare(way, ["whole", "half", "nested"], stage, keep, mode)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@on_ranks(2)
def test_a_backward_inside_of_a_backward_is_refused_by_name(schedule: str) -> None:
    engine = engine_of("reentrant", 0, (schedule, None), "step", "fp32")
    with pytest.raises(ZerodriftError, match="`checkpoint`: must be called with `use_reentrant=False`"):
        engine.train_batch(data(0, 0))


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_compiled_blocks_run_where_backwards_are_whole() -> None:
    """Only the graphs of autograd are compiled, which are what a schedule meets."""
    found = []
    for compiles in (False, True):
        model = GPT(LAYERS, tied=False)
        for layer in model.layers if compiles else ():
            layer.compile(backend="aot_eager")
        engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, model)
        found.append((engine.accumulate(data(0, 0)), gradients(engine)))
    (losses, plain), (others, other) = found
    assert losses == others and diff(plain, other) == []
    with pytest.raises(ZerodriftError, match=r"`layers\.0`: must not be compiled under `zbv`"):
        pipeline(config(0, "fp32", COUNT), "zbv", None, model)
