"""Real architectures, their experts on several ranks: gradients, files and checkpoints of a run without."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.described import found_elsewhere
from tests.numerics.experts import error
from tests.numerics.runs import config, make
from tests.ranks.harness import run_ranks

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

import zerodrift as zd
from tests.models.architectures import ARCHITECTURES, since, tokens
from zerodrift.api import initialize
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.engine.engine import Engine

pytestmark = since("5.0")  # experts are stacked

MIXTURES = [name for name, architecture in ARCHITECTURES.items() if architecture.routers]
ONE = [
    name if not number else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(MIXTURES)
]
"""The first of them in every run of the tests, the others where there is time."""


def written(name: str, experts: int, stage: int, mode: str, micro_batches: int = 1) -> dict[str, Any]:
    rules = [{"match": ARCHITECTURES[name].routers, "pin": "fp32"}]
    spread = {"experts": {"ranks": experts}} if experts > 1 else {}
    return {**config(stage, mode, micro_batches, precision={"rules": rules}), **spread}


def steps(engine: Engine, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        ids = tokens(step % 3, engine.mesh.rank())
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# --- gradients ------------------------------------------------------------------------------------------


def reference(model: torch.nn.Module, ranks: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """The averaged gradient in one process, in fp64."""
    model.double()
    model.set_experts_implementation("eager")  # grouped products know no fp64
    for rank in range(ranks):
        for micro in range(micro_batches):
            ids = tokens(micro, rank)
            (model(input_ids=ids, labels=ids).loss / (ranks * micro_batches)).backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@dataclass
class Report:
    errors: dict[str, list[float]] = field(default_factory=dict)
    """By parameter, without and with expert parallelism."""
    norms: list[float | None] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    generated: list[torch.Tensor] = field(default_factory=list)
    """What the first weights continue a prompt with, another on each rank."""


def gradients(name: str, mode: str, stage: int) -> Report:
    expected, report = reference(ARCHITECTURES[name].model(), 4, 2), Report()
    for experts in (1, 2):
        engine = make(written(name, experts, stage, mode, 2), ARCHITECTURES[name].model())
        losses = []
        length = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        prompt = tokens(0, engine.mesh.rank())[:, :4]
        report.generated.append(engine.eval().module.generate(prompt, **length))
        engine.train()
        for micro in range(2):
            ids = tokens(micro, engine.mesh.rank())
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            losses.append(loss.item())
        for key, value in expected.items():
            report.errors.setdefault(key, []).append(error(engine.parameter(key).gradient, value))
        report.norms.append(engine.step().grad_norm)
        report.losses.append([*losses, *steps(engine, 0, 2)])
        engine.destroy()
    return report


@pytest.mark.parametrize("name", ONE)
def test_gradients_are_those_without_expert_parallelism(name: str) -> None:
    for report in run_ranks(gradients, 4, name, "fp32", 3, timeout=200):
        assert any(".experts." in key for key in report.errors)
        for key, (before, now) in report.errors.items():
            assert now < max(1e-6, 1.2 * before), (key, before, now)
        assert torch.equal(*report.generated)
        assert report.norms[0] == pytest.approx(report.norms[1], rel=1e-7)
        assert report.losses[0] == pytest.approx(report.losses[1], rel=1e-5)


def test_in_bf16_it_is_no_further_from_fp64() -> None:
    for report in run_ranks(gradients, 4, "gpt-oss", "bf16", 2, timeout=200):
        before, now = (sum(pair[n] for pair in report.errors.values()) / len(report.errors) for n in (0, 1))
        assert now < 1.15 * before
        assert all(now < before + 5e-3 for before, now in report.errors.values()), report.errors


# --- with a pipeline --------------------------------------------------------------------------------------

DEPTH, COUNT = 4, 4
"""Layers, as two ranks with two pieces each need them; micro-batches."""

SCHEDULES = ("1f1b", "interleaved-zero-bubble", "zbv", "dualpipev")


def deep(name: str) -> torch.nn.Module:
    """The architecture with more layers."""
    small = ARCHITECTURES[name].model()
    changed = copy.deepcopy(small.config)
    for key in ("layer_types", "mlp_layer_types"):
        if getattr(changed, key, None):
            setattr(changed, key, (list(getattr(changed, key)) * DEPTH)[-DEPTH:])
    changed.num_hidden_layers = DEPTH
    torch.manual_seed(0)
    return type(small)(changed)


def in_a_pipeline(
    name: str, stage: int, schedules: tuple[str, ...]
) -> list[tuple[str, dict[str, float], float | None]]:
    """By schedule: errors of this rank's parameters, and the norm."""
    expected, found = reference(deep(name), 2, COUNT), []
    for schedule in schedules:
        block = {"stages": 2, "schedule": schedule, "micro_batches": COUNT}
        config = {**written(name, 2, stage, "fp32", COUNT), "pipeline": block}
        engine = initialize(deep(name), config=config, device="cpu", quiet=True)
        batches = [tokens(micro, engine.mesh.rank("data")) for micro in range(COUNT)]
        engine.accumulate([{"input_ids": ids, "labels": ids} for ids in batches])
        rows = [row.name for row in engine.plan.rows]
        errors = {row: error(engine.parameter(row).gradient, expected[row]) for row in rows}
        found.append((schedule, errors, engine.step().grad_norm))
        engine.destroy()
    return found


PIPELINES = [
    ("qwen3-moe", 3, SCHEDULES[::2]),
    pytest.param("qwen3-moe", 3, SCHEDULES, marks=pytest.mark.slow),
    pytest.param("gpt-oss", 0, SCHEDULES, marks=pytest.mark.slow),
    pytest.param("deepseek-v3", 2, SCHEDULES, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "stage", "schedules"), PIPELINES)
def test_stages_of_a_pipeline_have_experts_on_several_ranks(
    name: str, stage: int, schedules: tuple[str, ...]
) -> None:
    reports = run_ranks(in_a_pipeline, 4, name, stage, schedules, timeout=200)
    for told in zip(*reports, strict=True):
        assert len({norm for _, _, norm in told}) == 1
        seen = {key for _, errors, _ in told for key in errors}
        assert seen == {key for key, _ in deep(name).named_parameters()}
        for schedule, errors, _ in told:
            assert max(errors.values()) < 1e-6, (schedule, errors)


# --- files and checkpoints --------------------------------------------------------------------------------


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    found = {row.name: engine.parameter(row.name).master for row in engine.plan.rows}
    moments = [(row.name, dict(engine.parameter(row.name).state)) for row in engine.plan.rows]
    return {**found, **{f"{name} {key}": value for name, state in moments for key, value in state.items()}}


def differs(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == two.keys()
    return [key for key in one if not torch.equal(one[key], two[key])]


def through_files(name: str, folder: str) -> list[str]:
    """Initial values, a checkpoint there and back, an export: what differs, and what was read twice."""
    wrong = []
    with zd.empty():
        whole, spread = ARCHITECTURES[name].model(), ARCHITECTURES[name].model()
    engine = make(written(name, 1, 2, "bf16"), whole)
    first = masters(engine)
    engine.destroy()

    engine = make(written(name, 2, 3, "bf16"), spread)
    wrong += [f"first {key}" for key in differs(first, masters(engine))]
    steps(engine, 0, 2)
    saved = masters(engine)
    Checkpoints(engine, f"{folder}/spread", quiet=True).save()
    zd.export(engine, f"{folder}/export", max_shard_size="60KB")
    expected = steps(engine, 2, 2)
    after = masters(engine)
    engine.destroy()

    engine = make(written(name, 2, 3, "bf16"), ARCHITECTURES[name].model())
    Checkpoints(engine, f"{folder}/spread", quiet=True).resume()
    wrong += [] if steps(engine, 2, 2) == expected else ["resumed"]
    wrong += [f"resumed {key}" for key in differs(after, masters(engine))]
    engine.destroy()

    engine = make(written(name, 1, 0, "bf16"), ARCHITECTURES[name].model())
    Checkpoints(engine, f"{folder}/spread", quiet=True).resume()
    wrong += [f"together {key}" for key in differs(saved, masters(engine))]
    Checkpoints(engine, f"{folder}/whole", quiet=True).save()
    zd.export(engine, f"{folder}/again", max_shard_size="60KB")
    engine.destroy()

    engine = make(written(name, 2, 1, "bf16"), ARCHITECTURES[name].model())
    Checkpoints(engine, f"{folder}/whole", quiet=True).resume()
    wrong += [f"apart {key}" for key in differs(saved, masters(engine))]
    # Back to where it was, through files that hold what is visible.
    done = zd.load_weights(engine, f"{folder}/export", quiet=True)
    size = sum(Path(path).stat().st_size for path in Path(f"{folder}/export").glob("*.safetensors"))
    wrong += [] if done.bytes < size else [f"read {done.bytes} bytes of {size}"]
    loaded = masters(engine)
    engine.destroy()

    with zd.empty():
        model = ARCHITECTURES[name].model()
    engine = make(written(name, 2, 3, "bf16"), model, weights=f"{folder}/export")
    want = {row.name: loaded[row.name] for row in engine.plan.rows}
    wrong += [f"loaded {key}" for key in differs(want, {key: engine.parameter(key).master for key in want})]
    engine.destroy()
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE)
def test_files_do_not_know_of_expert_parallelism(name: str, tmp_path: Path) -> None:
    assert run_ranks(through_files, 4, name, str(tmp_path), timeout=200) == [[]] * 4
    for kind in ("spread", "whole"):
        assert found_elsewhere(tmp_path / kind / "step-00000002") == []
    for path in (tmp_path / "export").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
