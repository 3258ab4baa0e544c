"""Pipelines against one process: the same losses, the same gradients, every schedule, every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.described import found_elsewhere
from tests.numerics.networks import GPT, VOCABULARY, batch
from tests.numerics.runs import config, make, masters_and_states
from tests.ranks.harness import run_ranks
from tests.ranks.ways import WAYS
from zerodrift.api import initialize
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.engine.engine import Engine
from zerodrift.pipeline.cut import Parts
from zerodrift.pipeline.schedules import timeline

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
    written: dict[str, Any], schedule: str, weights: str | None, model: nn.Module, **block: Any
) -> Engine:
    torch.set_num_threads(1)
    block = {"stages": 2, "schedule": schedule, "micro_batches": COUNT, **block}
    if weights is not None:
        block["weight_grads"] = weights
    return initialize(model, config={**written, "pipeline": block}, parts=PARTS, device="cpu", quiet=True)


def data(step: int, rank: int) -> list[torch.Tensor]:
    return [batch(step, rank, micro) for micro in range(COUNT)]


def trained(engine: Engine) -> dict[str, Any]:
    rank = engine.mesh.rank("data")
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        result = engine.train_batch(data(step, rank))
        found["losses"] += result.losses
        found["norms"].append(result.step.grad_norm)
    found["evaluated"] = engine.evaluate(data(7, rank)[:3])
    found["masters"], found["states"] = masters_and_states(engine)
    return found


def whole(stage: int, mode: str, tied: bool) -> dict[str, Any]:
    """The same training without a pipeline."""
    torch.set_num_threads(1)
    engine = make(config(stage, mode, COUNT), GPT(LAYERS, tied=tied))
    rank = engine.mesh.rank("data")
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        for tokens in data(step, rank):
            loss = engine(tokens)
            engine.backward(loss)
            found["losses"].append(loss.item())
            result = engine.step()
        found["norms"].append(result.grad_norm)
    with torch.no_grad():
        found["evaluated"] = sum(engine(tokens).item() for tokens in data(7, rank)[:3]) / 3
    found["masters"], found["states"] = masters_and_states(engine)
    engine.destroy()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not bit for bit the same."""
    assert one["masters"].keys() == other["masters"].keys()
    found = [key for key in ("losses", "norms", "evaluated") if one[key] != other[key]]
    found += [
        name for name, value in one["masters"].items() if not torch.equal(value, other["masters"][name])
    ]
    for name, state in one["states"].items():
        found += [f"{name} {key}" for key in state if not torch.equal(state[key], other["states"][name][key])]
    return found


def every_way(stage: int, mode: str, tied: bool, ways: list[tuple[str, str | None]]) -> dict[str, Any]:
    found = {}
    for schedule, weights in ways:
        engine = pipeline(config(stage, mode, COUNT), schedule, weights, GPT(LAYERS, tied=tied))
        found[f"{schedule} {weights}"] = trained(engine)
        planned = timeline(engine.plan)
        engine.destroy()
        assert planned is not None
    return found


@pytest.mark.long
def test_every_schedule_trains_the_bits_of_one_process() -> None:
    """fp32, nothing tied: each micro-batch is computed as before, and added in the same order."""
    (alone,) = run_ranks(whole, 1, 0, "fp32", False)
    first, second = run_ranks(every_way, 2, 0, "fp32", False, WAYS, timeout=120.0)
    for way, seen in first.items():
        assert differences(alone, seen) == [], way
        assert differences(seen, second[way]) == [], way


AT_STAGES = [
    (0, "1f1b", None),
    (1, "zbv", "queue"),
    (2, "interleaved-zero-bubble", "autograd"),
    (3, "1f1b", None),
]
"""(stage, schedule, who forms late weight gradients); stages 2 and 3 reduce every micro-batch."""


def over_stages(**rest: Any) -> dict[int, dict[str, Any]]:
    found = {}
    for stage, schedule, weights in AT_STAGES:
        engine = pipeline(config(stage, "fp32", COUNT, **rest), schedule, weights, GPT(LAYERS, tied=False))
        found[stage] = trained(engine)
        engine.destroy()
    return found


def whole_over_stages() -> dict[int, dict[str, Any]]:
    return {stage: whole(stage, "fp32", False) for stage, *_ in AT_STAGES}


@pytest.mark.long
def test_two_pipelines_train_the_bits_of_two_data_ranks_at_every_stage() -> None:
    """pp 2 x dp 2: gradients are reduced inside of the ranks that hold the same pieces."""
    expected = run_ranks(whole_over_stages, 2, timeout=120.0)
    seen = run_ranks(over_stages, 4, timeout=120.0)
    for rank in range(4):
        for stage, *_ in AT_STAGES:
            assert differences(expected[rank % 2][stage], seen[rank][stage]) == [], (rank, stage)


# --- checkpoints --------------------------------------------------------------------------------------------


def state_of(engine: Engine) -> dict[str, Any]:
    """Every master and moment, full."""
    masters, states = masters_and_states(engine)
    return {"masters": masters, "states": states, "losses": [], "norms": [], "evaluated": 0}


def saves(folder: str) -> dict[str, Any]:
    """Two steps, a save, one more step."""
    engine = pipeline(config(0, "bf16", COUNT), "1f1b", None, GPT(LAYERS))
    for step in range(2):
        engine.train_batch(data(step, 0))
    Checkpoints(engine, folder, quiet=True).save()
    found = state_of(engine)
    found["losses"] = list(engine.train_batch(data(2, 0)).losses)
    engine.destroy()
    return found


def loads(folder: str, schedule: str, stage: int) -> dict[str, Any]:
    engine = pipeline(config(stage, "bf16", COUNT), schedule, None, GPT(LAYERS, seed=5))
    Checkpoints(engine, folder, quiet=True).load()
    found = state_of(engine)
    found["losses"] = list(engine.train_batch(data(2, engine.mesh.rank("data"))).losses)
    engine.destroy()
    return found


def alone_with(folder: str, load: bool) -> dict[str, Any]:
    """One rank without a pipeline: save after two steps, or load; then one more."""
    torch.set_num_threads(1)
    engine = make(config(0, "bf16", COUNT), GPT(LAYERS, seed=5 if load else 0))
    checkpoints = Checkpoints(engine, folder, quiet=True)
    if load:
        checkpoints.load()
    found: dict[str, Any] = {}
    losses: list[float] = []
    for step in range(2 if load else 0, 3):
        if step == 2:
            found = state_of(engine)
            if not load:
                checkpoints.save()
        losses.clear()
        for tokens in data(step, 0):
            loss = engine(tokens)
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
    engine.destroy()
    return {**found, "losses": losses}


@pytest.mark.long
def test_a_checkpoint_of_a_pipeline_loads_into_any_other_shape_and_back(tmp_path: Path) -> None:
    folder = str(tmp_path / "pipeline")
    saved = run_ranks(saves, 2, folder)[0]
    assert found_elsewhere(tmp_path / "pipeline" / "step-00000002") == []
    assert differences(saved, run_ranks(loads, 2, folder, "1f1b", 0)[0]) == []
    assert differences(saved, run_ranks(alone_with, 1, folder, True)[0]) == []
    for other in run_ranks(loads, 4, folder, "zbv", 3):
        assert differences(saved, {**other, "losses": saved["losses"]}) == []  # other data


def test_a_checkpoint_of_one_process_loads_into_a_pipeline(tmp_path: Path) -> None:
    saved = run_ranks(alone_with, 1, str(tmp_path), False)[0]
    seen = run_ranks(loads, 2, str(tmp_path), "zbv", 0)[0]
    assert seen["losses"] == saved["losses"]  # the same values, in the same forward
