"""Recomputed and compiled layers inside the pieces of a pipeline: the same bits, each counted once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.numerics.networks import GPT
from tests.numerics.runs import config
from tests.numerics.test_pipelines import COUNT, LAYERS, PARTS, data, pipeline
from tests.ranks.harness import run_ranks
from tests.ranks.ways import WAYS
from zerodrift.api import initialize
from zerodrift.engine.engine import Engine
from zerodrift.errors import ZerodriftError

FEW: list[tuple[str, str | None]] = [
    ("1f1b", None),
    ("zbv", "queue"),
    ("zbv", "autograd"),
    ("dualpipev", "queue"),
]


def whole(layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    """The layer is recomputed."""
    out: torch.Tensor = checkpoint(layer, hidden, use_reentrant=False)
    return out


def half(layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    """A user's own layer: its second half is."""
    hidden = hidden + layer.attention(layer.norm1(hidden))
    out: torch.Tensor = checkpoint(lambda x: x + layer.mlp(layer.norm2(x)), hidden, use_reentrant=False)
    return out


def nested(layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    """Both, one in the other."""
    out: torch.Tensor = checkpoint(half, layer, hidden, batch, use_reentrant=False)
    return out


HOW = {"not": PARTS.each, "whole": whole, "half": half, "nested": nested}


@dataclass
class Seen:
    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]
    forwards: int
    """Of the first product of this rank's MLPs, recomputations included, per layer and micro-batch."""


def engine_of(how: str, stage: int, schedule: str, weights: str | None, keep: str, mode: str) -> Engine:
    torch.set_num_threads(1)
    block: dict[str, Any] = {"stages": 2, "schedule": schedule, "micro_batches": COUNT}
    if weights is not None:
        block["weight_grads"] = weights
    written = config(stage, mode, COUNT, pipeline=block, sharding={"keep_gathered": keep})
    parts = replace(PARTS, each=HOW[how])
    return initialize(GPT(LAYERS, tied=False), config=written, parts=parts, device="cpu", quiet=True)


def seen(how: str, *what: Any) -> Seen:
    engine = engine_of(how, *what)
    rank = engine.mesh.rank("data")
    engine.train_batch(data(0, rank))
    calls: list[int] = []
    layers = [
        layer for piece in engine.executor.forwards for layer in piece.module.layers if hasattr(layer, "mlp")
    ]
    handles = [layer.mlp.up.register_forward_pre_hook(lambda *_: calls.append(1)) for layer in layers]
    losses = engine.accumulate(data(1, rank))
    for handle in handles:
        handle.remove()
    gradients = {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}
    held = {id(layer) for layer in layers}
    found = Seen(losses, gradients, len(calls) // (COUNT * len(held)))
    engine.step()
    engine.destroy()
    return found


def compared(
    ways: list[tuple[str, str | None]], hows: list[str], stage: int, keep: str, mode: str
) -> list[str]:
    wrong = []
    for schedule, weights in ways:
        plain = seen("not", stage, schedule, weights, keep, mode)
        assert plain.forwards == 1
        for how in hows:
            here = f"{schedule} {weights} {how}"
            found = seen(how, stage, schedule, weights, keep, mode)
            wrong += [] if found.losses == plain.losses else [f"{here} losses"]
            wrong += [
                f"{here} {name}"
                for name, value in plain.gradients.items()
                if not torch.equal(value, found.gradients[name])
            ]
            # Autograd's second pass recomputes for every group of weights that it comes to.
            most = 99 if weights == "autograd" else 3 if how == "nested" else 2
            wrong += [] if 2 <= found.forwards <= most else [f"{here} {found.forwards} forwards"]
    return wrong


@pytest.mark.parametrize("way", FEW)
def test_gradients_are_the_same_bits_and_counted_once(way: tuple[str, str | None]) -> None:
    assert run_ranks(compared, 2, [way], ["whole"], 0, "step", "fp32") == [[]] * 2


def test_gradients_of_sliced_parameters_that_are_gathered_for_each_part_too() -> None:
    assert (
        run_ranks(compared, 4, [("zbv", "queue")], ["half"], 3, "micro-batch", "bf16", timeout=120)
        == [[]] * 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("stage", "keep"), [(0, "step"), (3, "step"), (3, "micro-batch")])
def test_every_schedule(way: tuple[str, str | None], stage: int, keep: str) -> None:
    if keep == "micro-batch" and way[1] == "autograd":
        pytest.skip("refused: what autograd would regather in its second pass is gone")
    world = 4 if stage else 2
    for mode in ("fp32", "bf16"):
        found = run_ranks(compared, world, [way], ["whole", "half", "nested"], stage, keep, mode, timeout=240)
        assert found == [[]] * world


# --- refused ------------------------------------------------------------------------------------------------


def reentrant(layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    out: torch.Tensor = checkpoint(layer, hidden.requires_grad_(), use_reentrant=True)
    return out


HOW["reentrant"] = reentrant


def refused(schedule: str) -> str:
    engine = engine_of("reentrant", 0, schedule, None, "step", "fp32")
    try:
        engine.train_batch(data(0, 0))
    except ZerodriftError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_backward_inside_of_a_backward_is_refused_by_name(schedule: str) -> None:
    for said in run_ranks(refused, 2, schedule):
        assert "`checkpoint`: must be called with `use_reentrant=False`" in said


# --- compiled blocks ----------------------------------------------------------------------------------------


def compiled(schedule: str) -> str:
    """Bits of a run with compiled blocks, or why there is none. Nothing is generated: the graphs of autograd
    are, and those are what a schedule meets."""
    torch.set_num_threads(1)
    found = []
    for compiles in (False, True):
        model = GPT(LAYERS, tied=False)
        for layer in model.layers if compiles else ():
            layer.compile(backend="aot_eager")
        try:
            engine = pipeline(config(0, "fp32", COUNT), schedule, None, model)
        except ZerodriftError as error:
            return str(error)
        losses = engine.accumulate(data(0, 0))
        found.append((losses, {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}))
        engine.destroy()
    same = all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
    return "same" if same and found[0][0] == found[1][0] else "not the same"


@pytest.mark.slow
def test_compiled_blocks_run_where_backwards_are_whole() -> None:
    assert run_ranks(compiled, 2, "1f1b", timeout=120) == ["same"] * 2
    for said in run_ranks(compiled, 2, "zbv", timeout=120):
        assert said.startswith("`layers.0`: must not be compiled under `zbv`")
