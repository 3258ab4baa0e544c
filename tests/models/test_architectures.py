"""Real architectures train the same bits at stages 0 and 3, with activation checkpointing and without."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.runs import Run, config, finish, make, same
from tests.ranks.harness import run_ranks
from zerodrift.engine.engine import Engine

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

from tests.models.architectures import ARCHITECTURES, Architecture, recompute, some, tokens
from zerodrift.train.tools.sample import cache_name

STEPS, ENOUGH = 4, 20
"""Steps that are compared, and those in which a model learns."""
Case = tuple[int, bool | None]
"""Stage; no activation checkpointing, or its `use_reentrant`."""

ALL: list[Case] = [(stage, reentrant) for stage in (0, 3) for reentrant in (None, False, True)]
SOME: list[Case] = [(0, None), (0, False), (3, None), (3, True)]


@dataclass
class Report:
    """What a rank saw of one architecture."""

    differences: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of a run that is long enough to learn."""
    forwards: list[int] = field(default_factory=list)
    """Forwards of the first layer per step and run: two with checkpointing."""
    generated: list[torch.Tensor] = field(default_factory=list)
    """Tokens that each stage's model continues a prompt with."""
    routers: set[torch.dtype] = field(default_factory=set)
    units: list[str] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    """The loss of a step after generating, per stage."""


def written(architecture: Architecture, stage: int, mode: str) -> dict[str, Any]:
    rules = [{"match": architecture.routers, "pin": "fp32"}] if architecture.routers else []
    return config(stage, mode, precision={"rules": rules})


def compare(name: str, mode: str, cases: list[Case]) -> Report:
    """On a rank."""
    architecture = ARCHITECTURES[name]
    runs: list[Run] = []
    report = Report()
    for stage, reentrant in cases:
        model = architecture.model()
        if reentrant is not None:
            recompute(model, reentrant)
        forwards = _count_forwards(model)
        engine = make(written(architecture, stage, mode), model)
        runs.append(train(engine, STEPS))
        report.forwards.append(len(forwards) // STEPS)
        if reentrant is None:
            _look(engine, architecture, report)
        engine.destroy()
    report.differences = same(runs)
    engine = make(written(architecture, 3, mode), architecture.model())
    report.losses = train(engine, ENOUGH).losses
    engine.destroy()
    return report


def _count_forwards(model: nn.Module) -> list[None]:
    calls: list[None] = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(None))
    return calls


def train(engine: Engine, steps: int) -> Run:
    run = Run()
    for step in range(steps):
        batch = tokens(step % 2, engine.mesh.rank())
        loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
        engine.backward(loss)
        result = engine.step()
        run.losses.append(loss.item())
        run.norms.append(result.grad_norm)
    finish(engine, run)
    return run


def _look(engine: Engine, architecture: Architecture, report: Report) -> None:
    """Generate, and train on."""
    prompt = tokens(0)[:, :4]
    engine.eval()
    length = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    report.generated.append(engine.module.generate(prompt, **length))
    assert not any(segment.is_full for segment in engine.executor.segments if segment.gathers)
    engine.train()
    batch = tokens(0, engine.mesh.rank())
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    assert engine.step().updated
    report.resumed.append(loss.item())
    report.units = [unit.name for unit in engine.plan.units]
    if architecture.routers:
        routers = [row for row in engine.plan.rows if row.columns.pinned]
        report.routers |= {engine.module.get_parameter(row.name).dtype for row in routers}


@pytest.mark.parametrize(
    ("mode", "cases"),
    [
        pytest.param("bf16", SOME, id="bf16"),
        pytest.param("bf16", ALL, id="bf16-all", marks=pytest.mark.slow),
        pytest.param("fp32", ALL, id="fp32-all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", some("llama", "qwen3-moe"))
def test_stages_and_checkpointing_are_the_same_bits(name: str, mode: str, cases: list[Case]) -> None:
    for report in run_ranks(compare, 2, name, mode, cases, timeout=200):
        assert report.differences == []
        recomputed = [1 if reentrant is None else 2 for _, reentrant in cases]
        assert report.forwards == recomputed, "checkpointing recomputes"
        assert report.losses[-1] < report.losses[0] - 1.0, f"did not learn: {report.losses}"
        assert report.units == ["", "model.layers.0", "model.layers.1"]
        assert report.routers == ({torch.float32} if ARCHITECTURES[name].routers else set())
        first, *others = report.generated
        assert first.shape == (2, 8) and all(torch.equal(first, other) for other in others)
        assert len(set(report.resumed)) == 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_sampler_hands_the_librarys_cache_on(name: str) -> None:
    model, ids, cache = ARCHITECTURES[name].model().eval(), tokens(0), cache_name(ARCHITECTURES[name].model())
    before = model(input_ids=ids[:, :-1], use_cache=True)
    after = model(input_ids=ids[:, -1:], use_cache=True, **{cache: getattr(before, cache)})
    torch.testing.assert_close(after.logits[:, -1], model(input_ids=ids).logits[:, -1])
