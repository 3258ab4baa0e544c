"""Experts on several ranks have the averaged gradient of a run without, for any routing."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
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
from zerodrift.errors import ConfigError, ModelError
from zerodrift.inspect.check import compare
from zerodrift.inspect.trace.engine import observe
from zerodrift.plan.bill import cost
from zerodrift.plan.schedule import collectives

MICRO = 2
MESHES: dict[str, dict[str, Any]] = {
    "ep2": {},
    "ep2 x 2": {},
    "ep4": {"experts": {"ranks": 4}},
    "ep2, 2 replicas": {"sharding": {"replicate": 2}},
}
"""Name -> keys of the config that make the mesh."""


def slow(*value: Any) -> Any:
    """Return a case that is marked slow."""
    return pytest.param(*value, marks=pytest.mark.slow)


def config(stage: int, mesh: str, mode: str = "fp32", experts: int = 2, **rest: Any) -> dict[str, Any]:
    """Return a config that reduces every micro-batch at every stage, so that all form the same sums."""
    precision = {"reduce": {"when": "every"}, **rest.pop("precision", {})}
    made = config_of(experts, stage, mode, MICRO, precision=precision, **rest)
    return {**made, **MESHES[mesh]}


def engine_of(written: dict[str, Any], **network: Any) -> Engine:
    return make(written, Network(**network))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "world", "stages"),
    [
        ("ep2 x 2", 4, (0, 3)),
        slow("ep2", 2, (0, 3)),
        slow("ep2 x 2", 4, (0, 1, 2, 3)),
        slow("ep4", 4, (1, 3)),
        slow("ep2, 2 replicas", 4, (0, 2)),
    ],
)
@on_ranks("world")
def test_the_gradient_is_the_average_and_stages_are_the_same_bits(
    mesh: str, world: int, stages: tuple[int, ...]
) -> None:
    expected = reference(world, MICRO)
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


@pytest.mark.long
@on_ranks(2)
def test_a_run_in_bf16_is_as_near_to_fp64_as_one_without() -> None:
    """It is the products that err; one rounding more or less is another draw of the same."""
    expected = reference(2, MICRO)
    errors, losses = [], []
    for experts in (1, 2):
        engine = engine_of(config(2, "ep2", "bf16", experts))
        accumulate(engine, MICRO)
        found = gradients(engine)
        errors.append({name: error(found[name], expected[name]) for name in expected})
        engine.zero_grad()
        losses.append(train(engine, 6, MICRO, data=batch).losses)
    (before, now), (without, spread) = errors, losses
    assert all(now[name] < before[name] + 5e-3 for name in now), now
    assert sum(now.values()) < 1.15 * sum(before.values())
    assert without[:MICRO] == pytest.approx(spread[:MICRO], rel=1e-2)
    assert sum(spread[-2:]) < sum(spread[:2])


# Several ranks would share the blocks of a bias.
NARROW = {
    "gather": "mxfp8",
    "reduce": {"wire": "fp8", "when": "every"},
    "rules": [{"match": "*.bias", "gather": "fp32"}],
}
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    # To make a matrix orthogonal raises what is small in it, with its rounding.
    "Muon": ({"optimizer": {"type": "Muon", "params": {"lr": 1e-2, "ns_dtype": "fp32"}}}, 1e-4),
    "Adamax": ({}, 1e-5),
    # Blocks of 256 elements begin where a rank's experts begin.
    "8bit": ({"precision": {"state": "8bit"}}, 0.05),
    # Experts are rounded on the wire once for two ranks, as their sum leaves.
    "narrow wire": ({"precision": {"reduce": {"wire": "bf16", "when": "last"}}}, 0.05),
    "narrow columns": ({"precision": NARROW}, 0.5),
}
"""Name -> keys of the config, and the largest difference of updates relative to their size."""


@pytest.mark.parametrize("way", ["Adamax", *(slow(each) for each in WAYS if each != "Adamax")])
@pytest.mark.long
@on_ranks(4)
def test_every_update_is_that_of_a_run_without(way: str) -> None:
    """Differences of masters are compared with the length of their path; stages have the same bits."""
    first = dict(Network().named_parameters())
    runs = []
    for experts, stage in ((1, 2), (2, 2), (2, 3)):
        model, given = Network(), None
        made = config(stage, "ep2 x 2", "fp32", experts, **copy.deepcopy(WAYS[way][0]))
        if way == "Adamax":
            del made["optimizer"]
            given = torch.optim.Adamax(model.parameters(), lr=1e-3)
        engine = make(made, model, optimizer=given)
        runs.append(train(engine, 3, MICRO, data=batch))
    pairs = {name: (value, runs[1].masters[name]) for name, value in runs[0].masters.items()}
    apart = {n: float((two - one).norm() / (one - first[n]).norm()) for n, (one, two) in pairs.items()}
    assert max(apart.values()) < WAYS[way][1], apart
    assert same(runs[1:]) == []


CASES: dict[str, dict[str, Any]] = {
    "all experts of rank 1": {"skew": (0.0, 0.0, 60.0, 60.0)},
    "one expert gets nothing": {"skew": (-60.0, 0.0, 0.0, 0.0)},
    "some tokens go nowhere": {"dropped": 5},
    "no token goes anywhere": {"dropped": 1000},
}


@pytest.mark.parametrize("case", [*list(CASES)[:2], *(slow(each) for each in list(CASES)[2:])])
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


@on_ranks(2)
def test_a_gradient_in_the_loss_goes_through_exchanges_twice() -> None:
    def loss(call: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = call(x)
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        made: torch.Tensor = out + grad.square().sum()
        return made

    plain = Network().double()
    for rank in range(2):
        (loss(plain, batch(0, rank, 0).double()) / 2).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for stage in (1, 3):
        engine = engine_of(config(stage, "ep2"))
        for _ in range(MICRO):
            engine.backward(loss(engine, batch(0, engine.mesh.rank("data"), 0)))
        errors = {name: error(value, expected[name]) for name, value in gradients(engine).items()}
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.second
@pytest.mark.parametrize("rank", [slow(1), 2])
@on_ranks(4)
def test_what_is_not_finite_on_one_rank_is_found_by_all(rank: int) -> None:
    """A gradient of one rank's experts is not finite in the first step of fp16."""
    fp16 = {"enabled": True, "hysteresis": 1, "initial_scale_power": 4}
    engine = engine_of(config(3, "ep2 x 2", "fp16", fp16=fp16))
    down, handles = engine.module.layers[0].experts.down, []
    if engine.mesh.rank() == rank:
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
@pytest.mark.parametrize(
    ("mesh", "stages"), [("ep2 x 2", (0, 3)), slow("ep4", (1, 3)), ("ep2, 2 replicas", (0, 1))]
)
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


@pytest.mark.long
@on_ranks(4)
def test_the_observer_sees_the_plan() -> None:
    """Every column of every expert is the plan's, in the tables too."""
    for stage in (1, 3):
        engine = engine_of(config(stage, "ep2 x 2", "bf16"))
        with observe(engine) as seen:
            accumulate(engine, MICRO)
            engine.step()
        compare.require_declared(engine.plan, seen)
        row = engine.plan.row("layers.0.experts.down")
        assert row is not None
        for column in ("storage", "compute", "accumulate", "reduce", "master", "state"):
            assert seen.seen(row.name, column), column


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(4)
def test_values_are_whole(stage: int) -> None:
    """Values are read back whole as they were written, and a copy of the model runs."""
    engine = engine_of(config(stage, "ep2 x 2"))
    before = Network().state_dict()
    stored = sum(segment.storage.nbytes for segment in engine.executor.segments)
    assert stored == cost(engine.plan).rest.storage
    require_alike(whole_values(engine)["master"], before)
    train(engine, 1, MICRO, data=batch)
    name = "layers.1.experts.up"
    parameter = engine.parameter(name)
    new = torch.randn(before[name].shape, generator=torch.Generator().manual_seed(9))
    parameter.master = new
    parameter.state["exp_avg"] = 2 * new
    accumulate(engine, MICRO)
    parameter.gradient = new
    assert error(parameter.gradient, new) < 1e-6
    engine.zero_grad()
    rank = engine.mesh.rank("expert")
    with engine.gathered([name], write=True) as shown:
        assert torch.equal(shown[name], new[2 * rank : 2 * rank + 2])
        if engine.mesh.rank() < 2:
            shown[name].add_(1.0)
    assert torch.equal(parameter.master, new + 1.0)
    assert torch.equal(parameter.state["exp_avg"], 2 * new)
    with engine.gathered(), torch.no_grad():
        x = batch(0, engine.mesh.rank("data"), 0)
        assert torch.equal(engine.module(x), copy.deepcopy(engine.module)(x))
    module = engine.module.layers[0].experts
    engine.destroy()
    assert "forward" not in module.__dict__


@pytest.mark.second
@pytest.mark.parametrize("stage", [slow(0), 2])
@on_ranks(4)
def test_statistics_are_of_whole_parameters(stage: int) -> None:
    lines = []
    for experts in (1, 2):
        engine = engine_of(config(stage, "ep2 x 2", "bf16", experts, precision={"statistics": True}))
        accumulate(engine, MICRO)
        engine.step()
        lines.append(engine.update_statistics().lines)
    for before, now in zip(*lines, strict=True):
        assert (now.name, now.numel) == (before.name, before.numel)
        assert now.weight_norm == pytest.approx(before.weight_norm, rel=1e-6)


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@on_ranks(2)
def test_what_cannot_be_spread_is_refused_by_name_on_every_rank() -> None:
    two = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    alone, stacked = (nn.ModuleDict({"experts": inside}) for inside in (NoForward(), two))
    for model, kind, told in (
        (alone, ModelError, r"`experts`: must have a forward of tokens.*got \(x: "),
        (stacked, ConfigError, r"`experts\.0\.weight`: must stack all experts"),
        (nn.Linear(8, 8), ConfigError, r"`experts\.parameters`: must match a parameter"),
    ):
        with pytest.raises(kind, match=told):
            make({**config_of(2, 0), "experts": {"ranks": 2, "parameters": ["*experts.*"]}}, model)
