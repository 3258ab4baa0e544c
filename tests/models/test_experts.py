"""Real architectures with experts on several ranks: gradients, files and checkpoints as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics.experts import error
from tests.numerics.runs import config, gradients, make
from tests.numerics.test_pipelines import pipeline
from tests.ranks.harness import on_ranks

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

from tests.models.architectures import ARCHITECTURES, deep, exact_gradients, labelled, rules, since, tokens
from zerodrift.engine.engine import Engine

pytestmark = since("5.0")  # experts are stacked


def config_of(name: str, experts: int, stage: int, mode: str, micro_batches: int = 1) -> dict[str, Any]:
    spread = {"experts": {"ranks": experts}} if experts > 1 else {}
    return {**config(stage, mode, micro_batches, precision={"rules": rules(name)}), **spread}


def steps(engine: Engine, count: int) -> list[float]:
    losses = []
    for step in range(count):
        loss = engine(**labelled(step, engine.mesh.rank()), use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
@on_ranks(4, timeout=200)
def test_gradients_are_those_without_expert_parallelism(name: str) -> None:
    """Norms, losses and the continuation of a prompt agree too, with another prompt on each rank."""
    expected = exact_gradients(ARCHITECTURES[name].model(), 4, 2)
    errors, norms, losses, generated = [], [], [], []
    for experts in (1, 2):
        engine = make(config_of(name, experts, 3, "fp32", 2), ARCHITECTURES[name].model())
        length = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        prompt = tokens(0, engine.mesh.rank())[:, :4]
        generated.append(engine.eval().module.generate(prompt, **length))
        engine.train()
        for micro in range(2):
            engine.backward(engine(**labelled(micro, engine.mesh.rank()), use_cache=False).loss)
        errors.append({key: error(value, expected[key]) for key, value in gradients(engine).items()})
        norms.append(engine.step().grad_norm)
        losses.append(steps(engine, 2))
    before, now = errors
    assert any(".experts." in key for key in before)
    assert [key for key in now if now[key] >= max(1e-6, 1.2 * before[key])] == [], errors
    assert torch.equal(*generated)
    assert norms[0] == pytest.approx(norms[1], rel=1e-7), norms
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), losses


COUNT = 4


@pytest.mark.parametrize(
    ("name", "stage", "schedules"),
    [
        ("qwen3-moe", 3, ["zbv"]),
        pytest.param("deepseek-v3", 2, ["1f1b", "interleaved-zero-bubble"], marks=pytest.mark.slow),
    ],
)
@on_ranks(4, timeout=200)
def test_stages_of_a_pipeline_have_experts_on_several_ranks(
    name: str, stage: int, schedules: list[str]
) -> None:
    expected = exact_gradients(deep(name), 2, COUNT)
    for schedule in schedules:
        engine = pipeline(config_of(name, 2, stage, "fp32", COUNT), schedule, None, deep(name), None)
        engine.accumulate([labelled(micro, engine.mesh.rank("data")) for micro in range(COUNT)])
        errors = {row: error(value, expected[row]) for row, value in gradients(engine).items()}
        assert max(errors.values()) < 1e-6, (schedule, errors)
        every = engine.comm.all_gather_object((engine.step().grad_norm, list(errors)))
        assert len({norm for norm, _ in every}) == 1, every
        assert {key for _, keys in every for key in keys} == {key for key, _ in deep(name).named_parameters()}
