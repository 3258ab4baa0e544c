"""`reduce.order: tree` in pipelines: the bits of a run on one rank without one, under every schedule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config
from tests.numerics.test_pipelines import PARTS
from tests.ranks.harness import run_ranks
from zerodrift.api import initialize
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.engine.engine import Engine
from zerodrift.errors import ZerodriftError
from zerodrift.pipeline.cut import Parts
from zerodrift.pipeline.schedules import CLASSES
from zerodrift.policy.pipelining import V_SHAPED

STEPS, LAYERS = 2, 4
SCHEDULES = tuple(CLASSES)


class Signed(GPT):
    """With a parameter whose gradient is a negative zero: a sum of nothing else is one."""

    def __init__(self, moe: bool, tied: bool) -> None:
        super().__init__(LAYERS, moe, tied=tied)
        self.spare = nn.LayerNorm(8, bias=False)


def loss(model: Any, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return PARTS.after(model, hidden, tokens) + (model.spare.weight * -0.0).sum()


def dropped(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.2)


def recomputed(model: Any, layer: Any, hidden: torch.Tensor, tokens: Any) -> torch.Tensor:
    """Draws inside of what is recomputed, and behind it."""
    out: torch.Tensor = checkpoint(lambda x: dropped(layer(x)), hidden, use_reentrant=False)
    return dropped(out)


DROPPING = Parts(
    "layers",
    before=lambda model, tokens: dropped(model.embed(tokens)),
    each=lambda model, layer, hidden, tokens: dropped(layer(hidden)),
    after=lambda model, hidden, tokens: loss(model, dropped(hidden), tokens),
)
HOW = {
    "plain": replace(PARTS, after=loss),
    "dropping": DROPPING,
    "recomputed": replace(DROPPING, each=recomputed),
}


@dataclass(frozen=True)
class Cell:
    """One training run, in a pipeline or not."""

    schedule: str
    stage: int
    when: str
    mode: str = "fp32"
    how: str = "plain"
    moe: bool = False
    tied: bool = False
    total: int = 8
    """Micro-batches of a step, over all data ranks."""
    state: str = "fp32"
    sharding: dict[str, Any] = field(default_factory=dict, hash=False)

    def written(self, data_ranks: int, stages: int) -> dict[str, Any]:
        precision: dict[str, Any] = {"reduce": {"order": "tree", "when": self.when}, "state": self.state}
        if self.moe and self.mode != "fp32":
            precision["rules"] = [{"match": "*.router.*", "pin": "fp32"}]
        more = {"fp16": {"initial_scale_power": 22, "hysteresis": 1}} if "fp16" in self.mode else {}
        count = self.total // data_ranks
        written = config(self.stage, self.mode, count, precision=precision, **more)
        if stages > 1:
            sharding = {key: data_ranks if value == "data" else value for key, value in self.sharding.items()}
            written |= {"pipeline": {"stages": stages, "schedule": self.schedule}, "sharding": sharding}
        return written


def engine_of(cell: Cell, stages: int) -> Engine:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    written = cell.written(torch.distributed.get_world_size() // stages, stages)
    model = Signed(cell.moe, cell.tied)
    engine = initialize(model, config=written, parts=HOW[cell.how], device="cpu", quiet=True)
    engine.seed = 5
    return engine


def trained(cell: Cell, stages: int) -> tuple[Any, ...]:
    """Digests of what a run leaves and of the gradients on the way, its norms, and losses by number."""
    engine = engine_of(cell, stages)
    numbers = engine.micro_batches_of_this_rank()
    engine.accumulate([batch(STEPS, number) for number in numbers])
    gradients: list[Any] = [str(engine.parameter("norm.weight").gradient.tolist())]
    engine.zero_grad()
    engine.before_update = lambda: gradients.append(engine.gradient_digest())
    norms, losses = [], {}
    for step in range(STEPS + ("fp16" in cell.mode)):  # the first may be skipped
        result = engine.train_batch([batch(step, number) for number in numbers])
        norms.append((result.step.grad_norm, result.step.loss_scale))
        losses |= {(step, number): loss for number, loss in zip(numbers, result.losses, strict=True)}
    everywhere = engine.comm.all_gather_object(losses)
    left = engine.digest()
    skipped = engine.skipped_steps
    engine.destroy()
    assert bool(skipped) is ("fp16" in cell.mode), f"{skipped} skipped steps"
    return left, gradients, norms, {number: loss for part in everywhere for number, loss in part.items()}


def trained_all(cells: list[Cell], stages: int) -> list[tuple[Any, ...]]:
    return [trained(cell, stages) for cell in cells]


WORDS = ("state", "gradients", "norms", "losses")


def differing(cells: list[Cell], world: int) -> list[str]:
    """What of which cells is other in pipelines of two stages than on one rank without one."""
    expected, found = (
        run_ranks(trained_all, ranks, cells, stages, timeout=250)[0] for ranks, stages in ((1, 1), (world, 2))
    )
    return [
        f"{word}: {cell}"
        for cell, one, other in zip(cells, expected, found, strict=True)
        for word, left, right in zip(WORDS, one, other, strict=True)
        if left != right
    ]


FEW = [
    Cell("gpipe", 0, "last"),
    Cell("1f1b", 1, "every", "bf16", "dropping", state="8bit", sharding={"accumulator": "keep"}),
    Cell("1f1b", 2, "every", "fp16"),
    Cell("interleaved", 3, "last", "bf16", moe=True, sharding={"keep_gathered": "micro-batch"}),
    Cell("interleaved", 3, "every", "autocast-bf16", "recomputed"),
    Cell("interleaved-zero-bubble", 1, "last", "bf16", "recomputed"),
    Cell("zbv", 3, "every", "bf16", "dropping", tied=True),
    Cell("dualpipev", 0, "last", "fp32", "dropping"),
    Cell("1f1b", 3, "last", "bf16", state="bf16-stochastic", sharding={"replicate": "data"}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "cells"),
    [
        pytest.param(2, FEW[::3], id="one pipeline"),
        pytest.param(4, [cell for number, cell in enumerate(FEW) if number % 3], id="two pipelines"),
        *(pytest.param(world, FEW, id=f"all, {world} ranks", marks=pytest.mark.slow) for world in (2, 4)),
    ],
)
def test_pipelines_have_the_bits_of_one_rank(world: int, cells: list[Cell]) -> None:
    assert differing(cells, world) == []


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "autocast-bf16"])
def test_the_product_of_all(schedule: str, mode: str) -> None:
    cells = [
        Cell(schedule, stage, when, mode, how, moe=bool(stage % 2), tied=schedule in V_SHAPED)
        for stage in range(4)
        for when in ("last", "every")
        for how in HOW
    ]
    assert differing(cells, 4) == []


def looked_up_twice() -> str:
    """What is said of an embedding that the first piece uses twice, and the head's."""
    parts = replace(PARTS, before=lambda model, tokens: model.embed(tokens) + model.embed(tokens.flip(1)))
    written = Cell("zbv", 1, "last", total=4).written(1, 2)
    engine = initialize(GPT(LAYERS), config=written, parts=parts, device="cpu", quiet=True)
    with pytest.raises(ZerodriftError) as caught:
        engine.train_batch([batch(0, number) for number in range(4)])
    return str(caught.value)


def test_a_tied_embedding_is_looked_up_once() -> None:
    for told in run_ranks(looked_up_twice, 2):
        assert "must be looked up once in the first piece" in told
        assert "embed.weight" in told and "got EmbeddingBackward0, EmbeddingBackward0" in told


def going_on(folder: str, stages: int, first: int, last: int) -> str:
    """Steps of a run that is saved before and behind them, with a look at held-out data between."""
    engine = engine_of(Cell("zbv", 2, "every", "bf16", "dropping", tied=True), stages)
    checkpoints = Checkpoints(engine, folder, quiet=True)
    if first:
        checkpoints.load()
    numbers = engine.micro_batches_of_this_rank()
    for step in range(first, last):
        engine.train_batch([batch(step, number) for number in numbers])
        engine.evaluate([batch(9, number) for number in numbers[:3]])
    checkpoints.save()
    left = str(engine.digest())
    engine.destroy()
    return left


@pytest.mark.long
def test_a_run_goes_on_with_and_without_a_pipeline(tmp_path: Path) -> None:
    (alone,) = run_ranks(going_on, 1, str(tmp_path / "alone"), 1, 0, 3)
    folder = str(tmp_path / "turns")
    run_ranks(going_on, 4, folder, 2, 0, 1)
    run_ranks(going_on, 1, folder, 1, 1, 2)
    assert run_ranks(going_on, 2, folder, 2, 2, 3) == [alone, alone]
