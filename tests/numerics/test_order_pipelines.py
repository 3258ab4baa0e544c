"""`reduce.order: tree` in pipelines has the bits of a run on one rank, under every schedule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.checkpoint_files import misplaced_chunks
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config
from tests.numerics.test_order import Cell
from tests.numerics.test_pipelines import PARTS, pipeline
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.api import initialize
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.engine.engine import Engine
from zerodrift.errors import ZerodriftError
from zerodrift.pipeline.cut import Parts

STEPS, LAYERS = 2, 4


class Signed(GPT):
    """A GPT with a parameter whose gradient is a negative zero, which a sum with zero would lose."""

    def __init__(self, moe: bool, tied: bool) -> None:
        super().__init__(LAYERS, moe, tied=tied)
        self.spare = nn.LayerNorm(8, bias=False)


def loss(model: Any, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return PARTS.after(model, hidden, tokens) + (model.spare.weight * -0.0).sum()


def dropped(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.2)


def recomputed(model: Any, layer: Any, hidden: torch.Tensor, tokens: Any) -> torch.Tensor:
    """Draw inside of a recomputed layer, and behind it."""
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
class PipelineCell(Cell):
    """One training run, with or without a pipeline."""

    total: int = 8
    schedule: str = "1f1b"
    how: str = "plain"
    tied: bool = False
    sharding: dict[str, Any] = field(default_factory=dict, hash=False)

    def in_stages(self, data_ranks: int, stages: int) -> dict[str, Any]:
        written = self.written(data_ranks, scale=22)
        if stages > 1:
            sharding = {key: data_ranks if value == "data" else value for key, value in self.sharding.items()}
            written |= {"pipeline": {"stages": stages, "schedule": self.schedule}, "sharding": sharding}
        return written


def engine_of(cell: PipelineCell, stages: int) -> Engine:
    torch.manual_seed(0)
    written = cell.in_stages(torch.distributed.get_world_size() // stages, stages)
    model = Signed(cell.model == "moe", cell.tied)
    engine = initialize(model, config=written, parts=HOW[cell.how], device="cpu", quiet=True)
    engine.seed = 5
    return engine


def train_cell_in_pipeline(cell: PipelineCell, stages: int) -> tuple[Any, ...]:
    """Return digests of the state and of the gradients of each step, norms, and losses by number."""
    engine = engine_of(cell, stages)
    numbers = engine.micro_batches_of_this_rank()
    gradients: list[Any] = []
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


def trained_all(cells: list[PipelineCell], stages: int) -> list[tuple[Any, ...]]:
    return [train_cell_in_pipeline(cell, stages) for cell in cells]


def differing(cells: list[PipelineCell], world: int) -> list[str]:
    """List the results that differ between pipelines of two stages and one rank."""
    expected = run_ranks(trained_all, 1, cells, 1, timeout=250)[0]
    found = run_ranks(trained_all, world, cells, 2, timeout=250)[0]
    words = ("state", "gradients", "norms", "losses")
    return [
        f"{word}: {cell}"
        for cell, one, other in zip(cells, expected, found, strict=True)
        for word, left, right in zip(words, one, other, strict=True)
        if left != right
    ]


def cell(schedule: str, stage: int, when: str, mode: str = "fp32", **rest: Any) -> PipelineCell:
    return PipelineCell(stage, when, mode, schedule=schedule, **rest)


CELLS = [
    cell("gpipe", 0, "last"),
    cell("1f1b", 1, "every", "bf16", how="dropping", state="8bit", sharding={"accumulator": "keep"}),
    cell("1f1b", 2, "every", "fp16"),
    cell("interleaved", 3, "last", "bf16", model="moe", sharding={"keep_gathered": "micro-batch"}),
    cell("interleaved", 3, "every", "autocast-bf16", how="recomputed"),
    cell("interleaved-zero-bubble", 1, "last", "bf16", how="recomputed"),
    cell("zbv", 3, "every", "bf16", how="dropping", tied=True),
    cell("dualpipev", 0, "last", how="dropping"),
    cell("1f1b", 3, "last", "bf16", state="bf16-stochastic", sharding={"replicate": "data"}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "cells"),
    [
        pytest.param(2, CELLS[1:7:5], id="one pipeline"),
        pytest.param(4, CELLS[2:4], id="two pipelines"),
        pytest.param(4, CELLS, id="all", marks=pytest.mark.slow),
    ],
)
def test_pipelines_have_the_bits_of_one_rank(world: int, cells: list[PipelineCell]) -> None:
    assert differing(cells, world) == []


@on_ranks(2)
def test_a_tied_embedding_is_looked_up_once() -> None:
    """The first piece uses one embedding twice; the other is the head's too."""
    parts = replace(PARTS, before=lambda model, tokens: model.embed(tokens) + model.embed(tokens.flip(1)))
    written = config(1, "fp32", 4, precision={"reduce": {"order": "tree"}})
    engine = pipeline(written, "zbv", None, GPT(LAYERS), parts)
    told = r"embed\.weight.*must be looked up once in the first piece"
    told += ".*got EmbeddingBackward0, EmbeddingBackward0"
    with pytest.raises(ZerodriftError, match=f"(?s){told}"):
        engine.train_batch([batch(0, number) for number in range(4)])


def going_on(folder: str, stages: int, first: int, last: int) -> str:
    """Train steps of a run that is saved before and after, with an evaluation between."""
    engine = engine_of(cell("zbv", 2, "every", "bf16", how="dropping", tied=True), stages)
    checkpoints = Checkpoints(engine, folder, quiet=True)
    if first:
        checkpoints.load()
    numbers = engine.micro_batches_of_this_rank()
    for step in range(first, last):
        engine.train_batch([batch(step, number) for number in numbers])
        engine.evaluate([batch(9, number) for number in numbers[:3]])
    checkpoints.save()
    return str(engine.digest())


@pytest.mark.long
def test_a_run_goes_on_with_and_without_a_pipeline(tmp_path: Path) -> None:
    """A checkpoint of a pipeline loads into any other shape, and back."""
    (alone,) = run_ranks(going_on, 1, str(tmp_path / "alone"), 1, 0, 3)
    folder = str(tmp_path / "turns")
    run_ranks(going_on, 4, folder, 2, 0, 1)
    run_ranks(going_on, 1, folder, 1, 1, 2)
    assert misplaced_chunks(tmp_path / "turns" / "step-00000002") == []
    assert run_ranks(going_on, 2, folder, 2, 2, 3) == [alone, alone]
