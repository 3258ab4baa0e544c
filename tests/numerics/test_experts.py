"""Experts on several ranks have the averaged gradient of a run without, for any routing."""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.numerics.experts import EXPERTS, Network, accumulate, batch, config_of, error, reference
from tests.numerics.runs import (
    gradients,
    make,
    require_alike,
    same,
    train,
    whole_values,
)
from tests.ranks.harness import on_ranks
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError
from zerodrift.plan.bill import cost
from zerodrift.plan.schedule import collectives

MICRO = 2
MESHES: dict[str, dict[str, Any]] = {
    "ep2": {},
    "ep2 x 2": {},
    "ep2, 2 replicas": {"sharding": {"replicate": 2}},
}
"""Name -> keys of the config that make the mesh."""


def config(stage: int, mesh: str, mode: str = "fp32", experts: int = 2, **rest: Any) -> dict[str, Any]:
    """Return a config that reduces every micro-batch at every stage, so that all form the same sums."""
    precision = {"reduce": {"when": "every"}, **rest.pop("precision", {})}
    made = config_of(experts, stage, mode, MICRO, precision=precision, **rest)
    return {**made, **MESHES[mesh]}


def engine_of(written: dict[str, Any], **network: Any) -> Engine:
    return make(written, Network(**network))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "stages"),
    [("ep2 x 2", (0, 3)), pytest.param("ep2, 2 replicas", (0, 1, 2, 3), marks=pytest.mark.slow)],
)
@on_ranks(4)
def test_the_gradient_is_the_average_and_stages_are_the_same_bits(mesh: str, stages: tuple[int, ...]) -> None:
    expected = reference(4, MICRO)
    size = math.sqrt(sum(float(value.norm()) ** 2 for value in expected.values()))
    runs, norms = [], set()
    for stage in stages:
        engine = engine_of(config(stage, mesh, gradient_clipping=0.0))
        accumulate(engine, MICRO)
        norms.add(engine.step().grad_norm)
        # What the first update has seen, over all replicas.
        seen = {name: engine.parameter(name).state["exp_avg"] / 0.1 for name in expected}
        errors = {name: error(value, expected[name]) for name, value in seen.items()}
        assert len(errors) == 4 + 2 * 7 and max(errors.values()) < 1e-6, errors
        runs.append(train(engine, 2, MICRO, data=batch))
        engine.destroy()
    assert len(norms) == 1 and norms.pop() == pytest.approx(size, rel=1e-6)
    assert same(runs) == [], same(runs)


# Several ranks would share the blocks of a bias.
NARROW = {
    "gather": "mxfp8",
    "reduce": {"wire": "fp8", "when": "every"},
    "rules": [{"match": "*.bias", "gather": "fp32"}],
}
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    # Blocks of 256 elements begin where a rank's experts begin.
    "8bit": ({"precision": {"state": "8bit"}}, 0.05),
    "narrow columns": ({"precision": NARROW}, 0.5),
}
"""Name -> keys of the config, and the largest difference of updates relative to their size."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long
@on_ranks(4)
def test_every_update_is_that_of_a_run_without(way: str) -> None:
    """Differences of masters are compared with the length of their path; stages have the same bits."""
    first = dict(Network().named_parameters())
    runs = []
    for experts, stage in ((1, 2), (2, 2), (2, 3)):
        made = config(stage, "ep2 x 2", "fp32", experts, **copy.deepcopy(WAYS[way][0]))
        runs.append(train(engine_of(made), 3, MICRO, data=batch))
    pairs = {name: (value, runs[1].masters[name]) for name, value in runs[0].masters.items()}
    apart = {n: float((two - one).norm() / (one - first[n]).norm()) for n, (one, two) in pairs.items()}
    assert max(apart.values()) < WAYS[way][1], apart
    assert same(runs[1:]) == []


CASES: dict[str, dict[str, Any]] = {
    "all experts of rank 1": {"skew": (0.0, 0.0, 60.0, 60.0)},
    "some tokens go nowhere": {"dropped": 5},
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_experts_without_tokens_and_recomputation(case: str) -> None:
    """Activation checkpointing changes no bit."""
    expected = reference(2, MICRO, **CASES[case])
    first: dict[str, torch.Tensor] = {}
    for recompute in (None, False, True):
        engine = engine_of(config(3, "ep2"), recompute=recompute, **CASES[case])
        accumulate(engine, MICRO)
        values = gradients(engine)
        first = first or values
        require_alike(first, values)
        errors = {n: error(value, expected.get(n, torch.zeros_like(value))) for n, value in values.items()}
        assert max(errors.values()) < 2e-6, errors
        assert engine.step().updated


@pytest.mark.second
@on_ranks(4)
def test_what_is_not_finite_on_one_rank_is_found_by_all() -> None:
    """A gradient of one rank's experts is not finite in the first step of fp16."""
    fp16 = {"enabled": True, "hysteresis": 1, "initial_scale_power": 4}
    engine = engine_of(config(3, "ep2 x 2", "fp16", fp16=fp16))
    down, handles = engine.module.layers[0].experts.down, []
    if engine.mesh.rank() == 2:
        handles = [down.register_hook(lambda grad: torch.full_like(grad, float("inf")))]
    accumulate(engine, MICRO)
    first = engine.step()
    for handle in handles:
        handle.remove()
    accumulate(engine, MICRO)
    second = engine.step()
    assert first.skipped and not second.skipped
    assert first.bad == ("layers.0.experts.down",), first
    assert second.loss_scale == first.loss_scale / 2


@pytest.mark.second
@pytest.mark.parametrize(("mesh", "stages"), [("ep2 x 2", (0, 3)), ("ep2, 2 replicas", (0, 1))])
@on_ranks(4)
def test_what_is_sent_is_the_plan_and_an_exchange_of_tokens(mesh: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        engine = engine_of(config(stage, mesh))
        with engine.comm.record() as log:
            accumulate(engine, MICRO)
            engine.step()
        planned = [(c.op, c.dtype, c.numel, c.axis) for c in collectives(engine.plan)]
        engine.destroy()
        sent = [(c.op, c.dtype, c.numel, c.axis) for c in log if c.op != "all_to_all"]
        assert sent == planned, (sent, planned)
        # Per layer and micro-batch: counts, tokens there, results back; and back and there again.
        assert [c.axis for c in log if c.op == "all_to_all"] == ["expert"] * (2 * MICRO * 5)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(4)
def test_values_are_whole(stage: int, tmp_path: Path) -> None:
    """Values are those of a file, and are read back whole as they were written."""
    before = {name: value + 1.0 for name, value in Network().state_dict().items()}
    written, file = tmp_path / str(os.getpid()), tmp_path / "model.safetensors"
    save_file(before, written)
    os.replace(written, file)
    engine = make(config(stage, "ep2 x 2"), Network(), weights=file)
    stored = sum(segment.storage.nbytes for segment in engine.executor.segments)
    assert stored == cost(engine.plan).rest.storage
    require_alike(whole_values(engine)["master"], before)
    train(engine, 1, MICRO, data=batch)
    name = "layers.1.experts.up"
    parameter = engine.parameter(name)
    new = torch.randn(before[name].shape, generator=torch.Generator().manual_seed(9))
    parameter.master = new
    parameter.state["exp_avg"] = 2 * new
    rank = engine.mesh.rank("expert")
    with engine.gathered([name], write=True) as shown:
        assert torch.equal(shown[name], new[2 * rank : 2 * rank + 2])
        if engine.mesh.rank() < 2:
            shown[name].add_(1.0)
    assert torch.equal(parameter.master, new + 1.0)
    assert torch.equal(parameter.state["exp_avg"], 2 * new)


class NoTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@on_ranks(2)
def test_a_forward_without_tokens_is_refused_by_name_on_every_rank() -> None:
    written = {**config_of(2, 0), "experts": {"ranks": 2, "parameters": ["*experts.*"]}}
    with pytest.raises(ModelError, match=r"`experts`: must have a forward of tokens.*got \(x: "):
        make(written, nn.ModuleDict({"experts": NoTokens()}))
