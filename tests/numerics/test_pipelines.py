"""Pipelines have the losses and gradients of one process, under every schedule, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.numerics.networks import GPT, VOCABULARY, batch
from tests.numerics.runs import Run, config, make, masters_and_states, train
from tests.ranks.harness import destroy_at_the_end, run_ranks
from tests.ranks.ways import WAYS
from zerodrift.api import initialize
from zerodrift.engine.engine import Engine
from zerodrift.pipeline.cut import Parts

LAYERS, COUNT, STEPS = 4, 4, 2


def logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    return model.head(model.norm(hidden))[:, :-1].reshape(-1, VOCABULARY)


PARTS = Parts(
    "layers",
    before=lambda model, tokens: model.embed(tokens),
    after=lambda model, hidden, tokens: F.cross_entropy(
        logits(model, hidden).to(torch.promote_types(hidden.dtype, torch.float32)), tokens[:, 1:].reshape(-1)
    ),
)


def pipeline(
    written: dict[str, Any],
    schedule: str,
    weights: str | None,
    model: nn.Module,
    parts: Parts | None = PARTS,
    files: str | Path | None = None,
    **block: Any,
) -> Engine:
    """Make an engine, by default of two stages; `weights` says how late weight gradients are formed,
    `files` are loaded. Without `parts`, zerodrift cuts the model itself."""
    torch.set_num_threads(1)
    block = {"stages": 2, "schedule": schedule, "micro_batches": COUNT, **block}
    if weights is not None:
        block["weight_grads"] = weights
    written = {**written, "pipeline": block}
    made = initialize(model, config=written, parts=parts, weights=files, device="cpu", quiet=True)
    return destroy_at_the_end(made)


def data(step: int, rank: int) -> list[torch.Tensor]:
    return [batch(step, rank, micro) for micro in range(COUNT)]


def train_stages(stage: int, schedule: str, weights: str | None, tied: bool = False, **precision: Any) -> Run:
    """Return losses of steps and of an evaluation, norms, masters and moments."""
    written = config(stage, "fp32", COUNT, precision=precision)
    engine = pipeline(written, schedule, weights, GPT(LAYERS, tied=tied))
    run, rank = Run(), engine.mesh.rank("data")
    for step in range(STEPS):
        result = engine.train_batch(data(step, rank))
        run.losses += result.losses
        run.norms.append(result.step.grad_norm)
    run.losses.append(engine.evaluate(data(7, rank)[:3]))
    run.masters, run.states = masters_and_states(engine)
    return run


def whole(stage: int, **precision: Any) -> Run:
    """Train without a pipeline."""
    engine = make(config(stage, "fp32", COUNT, precision=precision), GPT(LAYERS, tied=False))
    run = train(engine, STEPS, COUNT)
    run.weights, run.scales = {}, []
    with torch.no_grad():
        rank = engine.mesh.rank("data")
        run.losses.append(sum(engine(tokens).item() for tokens in data(7, rank)[:3]) / 3)
    return run


def every_way() -> dict[str, Run]:
    return {f"{schedule} {weights}": train_stages(0, schedule, weights) for schedule, weights in WAYS}


@pytest.mark.long
def test_every_schedule_trains_the_bits_of_one_process() -> None:
    """Each fp32 micro-batch of an untied model is computed and added in the same order."""
    (alone,) = run_ranks(whole, 1, 0)
    first, second = run_ranks(every_way, 2, timeout=120.0)
    for way, seen in first.items():
        assert alone.differs(seen) == seen.differs(second[way]) == [], way


def in_fp8(alone: bool) -> list[Run]:
    ways = [("1f1b", None), ("zbv", "queue"), ("zbv", "autograd")]
    return [whole(1, compute="fp8")] if alone else [train_stages(1, *way, compute="fp8") for way in ways]


@pytest.mark.second
def test_products_in_fp8_are_the_bits_of_one_process() -> None:
    """Products for weight gradients agree too, which no queue defers."""
    ((alone,),) = run_ranks(in_fp8, 1, True)
    for found in run_ranks(in_fp8, 2, False, timeout=120.0):
        assert [alone.differs(run) for run in found] == [[]] * 3
    assert alone.differs(run_ranks(whole, 1, 1)[0])


AT_STAGES = [
    (0, "1f1b", None),
    (1, "zbv", "queue"),
    (2, "interleaved-zero-bubble", "autograd"),
    (3, "1f1b", None),
]
"""(stage, schedule, how late weight gradients are formed); stages 2 and 3 reduce every micro-batch."""


def over_stages() -> list[Run]:
    return [train_stages(*what) for what in AT_STAGES]


def whole_over_stages() -> list[Run]:
    return [whole(stage) for stage, *_ in AT_STAGES]


@pytest.mark.long
def test_two_pipelines_train_the_bits_of_two_data_ranks_at_every_stage() -> None:
    """Gradients of pp 2 x dp 2 are reduced among the ranks with the same pieces."""
    expected = run_ranks(whole_over_stages, 2, timeout=120.0)
    seen = run_ranks(over_stages, 4, timeout=120.0)
    for rank in range(4):
        for what, one, other in zip(AT_STAGES, expected[rank % 2], seen[rank], strict=True):
            assert one.differs(other) == [], (rank, what)
