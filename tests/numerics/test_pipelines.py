"""Pipelines have the losses and gradients of one process, under every schedule, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.numerics.networks import GPT, VOCABULARY, batch
from tests.numerics.runs import Run, config, make, masters_and_states, require_alike, train
from tests.ranks.harness import destroy_at_the_end, on_ranks, run_ranks
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
    engine.destroy()
    return run


def whole(stage: int, **precision: Any) -> Run:
    """Train without a pipeline."""
    engine = make(config(stage, "fp32", COUNT, precision=precision), GPT(LAYERS, tied=False))
    run = train(engine, STEPS, COUNT)
    run.weights, run.scales = {}, []
    with torch.no_grad():
        rank = engine.mesh.rank("data")
        run.losses.append(sum(engine(tokens).item() for tokens in data(7, rank)[:3]) / 3)
    engine.destroy()
    return run


Case = tuple[int, str, str | None, dict[str, Any]]
"""(stage, schedule, how late weight gradients are formed, keys of `precision`)"""

FP8, INT8 = {"compute": "fp8"}, {"gather": "int8"}
CASES: dict[int, list[Case]] = {
    1: [
        *((0, schedule, weights, {}) for schedule, weights in WAYS),
        *((1, *way, FP8) for way in (("1f1b", None), ("zbv", "queue"), ("zbv", "autograd"))),
        *((1, "1f1b", None, INT8), (3, "zbv", "queue", INT8)),
    ],
    # Stages 2 and 3 reduce every micro-batch.
    2: [
        *((0, "1f1b", None, {}), (1, "zbv", "queue", {})),
        *((2, "interleaved-zero-bubble", "autograd", {}), (3, "1f1b", None, {})),
    ],
}
"""Data ranks -> cases."""


def in_pipelines(cases: list[Case]) -> list[Run]:
    return [train_stages(stage, schedule, weights, **keys) for stage, schedule, weights, keys in cases]


def in_one_process(cases: list[Case]) -> list[Run]:
    kinds = {repr((stage, keys)): (stage, keys) for stage, _, _, keys in cases}
    runs = {kind: whole(stage, **keys) for kind, (stage, keys) in kinds.items()}
    return [runs[repr((stage, keys))] for stage, _, _, keys in cases]


@pytest.mark.long
@pytest.mark.parametrize("data_ranks", CASES)
def test_every_schedule_trains_the_bits_of_one_process(data_ranks: int) -> None:
    """Each fp32 micro-batch of an untied model is computed and added in the same order; gradients of two
    pipelines are reduced among the ranks with the same pieces."""
    cases = CASES[data_ranks]
    expected = run_ranks(in_one_process, data_ranks, cases, timeout=120.0)
    for rank, seen in enumerate(run_ranks(in_pipelines, 2 * data_ranks, cases, timeout=120.0)):
        for case, one, other in zip(cases, expected[rank % data_ranks], seen, strict=True):
            assert one.differs(other) == [], (rank, case)


@pytest.mark.second
@on_ranks(2)
def test_a_tied_matrix_is_gathered_narrow_on_both_ends() -> None:
    require_alike(*(train_stages(stage, "1f1b", None, tied=True, **INT8) for stage in (1, 3)))
