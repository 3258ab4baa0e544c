"""Experts on several ranks: the averaged gradient is that of a run without, whatever the data did."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.experts import (
    EXPERTS,
    Network,
    accumulate,
    batch,
    engine_of,
    error,
    gradients,
    reference,
    written,
)
from tests.numerics.runs import make, same, train
from tests.ranks.harness import run_ranks
from zerodrift.errors import ConfigError, ModelError
from zerodrift.inspect.check import compare
from zerodrift.inspect.trace.libraries.engine import observe
from zerodrift.pipeline.deferred import defer_weight_grads
from zerodrift.plan.cost import cost
from zerodrift.plan.schedule import collectives

MICRO = 2
MESHES = {
    "ep2": (2, {}),
    "ep2 x 2": (4, {}),
    "ep4": (4, {"experts": {"ranks": 4}}),
    "ep2, 2 replicas": (4, {"sharding": {"replicate": 2}}),
}
"""Name -> ranks, and what of the config makes the mesh."""
STAGES = {"ep2": (0, 3), "ep2 x 2": (0, 1, 2, 3), "ep4": (1, 3), "ep2, 2 replicas": (0, 2)}
ENDS = (0, 3)


def slow(value: Any) -> Any:
    """A case for where there is time."""
    return pytest.param(value, marks=pytest.mark.slow)


def config(stage: int, mesh: str, mode: str = "fp32", experts: int = 2, **rest: Any) -> dict[str, Any]:
    """Every micro-batch is reduced at every stage, so that all form the same sums."""
    precision = {"reduce": {"when": "every"}, **rest.pop("precision", {})}
    made = written(experts, stage, mode, MICRO, precision=precision, **rest)
    return {**made, **MESHES[mesh][1]}


# --- gradients ------------------------------------------------------------------------------------------


def all_stages(mesh: str, stages: tuple[int, ...]) -> tuple[dict[str, float], float, list[str]]:
    """Errors of the last stage by parameter, that of its norm, and what differs between the stages."""
    expected = reference(MESHES[mesh][0], MICRO)
    runs, found, norms = [], {}, []
    for stage in stages:
        engine = engine_of(config(stage, mesh, gradient_clipping=0.0))
        accumulate(engine, MICRO)
        norm = engine.step().grad_norm
        assert norm is not None
        norms.append(norm)
        # What the first update has seen, over all replicas.
        found = {name: engine.parameter(name).state["exp_avg"] / 0.1 for name in expected}
        runs.append(train(engine, 2, MICRO, data=batch))
        engine.destroy()
    errors = {name: error(found[name], expected[name]) for name in expected}
    size = math.sqrt(sum(float(value.norm()) ** 2 for value in expected.values()))
    assert len(set(norms)) == 1, norms
    return errors, norms[0] / size - 1.0, same(runs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "stages"),
    [("ep2 x 2", ENDS), *(pytest.param(*item, marks=pytest.mark.slow) for item in STAGES.items())],
)
def test_the_gradient_is_the_average_and_stages_are_the_same_bits(mesh: str, stages: tuple[int, ...]) -> None:
    for errors, norm, differences in run_ranks(all_stages, MESHES[mesh][0], mesh, stages):
        assert len(errors) == 4 + 2 * 7
        assert max(errors.values()) < 1e-6, errors
        assert abs(norm) < 1e-6
        assert differences == []


def with_and_without(
    mode: str, steps: int
) -> tuple[dict[str, tuple[float, float]], list[float], list[float]]:
    """By parameter the errors without and with expert parallelism; the losses without and with."""
    expected = reference(2, MICRO)
    errors, losses = [], []
    for experts in (1, 2):
        engine = engine_of(config(2, "ep2", mode, experts))
        accumulate(engine, MICRO)
        found = gradients(engine)
        errors.append({name: error(found[name], expected[name]) for name in expected})
        engine.zero_grad()
        losses.append(train(engine, steps, MICRO, data=batch).losses)
        engine.destroy()
    pairs = {name: (errors[0][name], errors[1][name]) for name in expected}
    return pairs, *losses  # type: ignore[return-value]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_run_is_as_near_to_fp64_as_one_without(mode: str) -> None:
    for errors, without, spread in run_ranks(with_and_without, 2, mode, 6):
        if mode == "fp32":
            assert max(now for _, now in errors.values()) < 1e-6, errors
        # In bf16 it is the products that err; one rounding more or less is another draw of the same.
        assert all(now < before + 5e-3 for before, now in errors.values()), errors
        assert sum(now for _, now in errors.values()) < 1.15 * sum(before for before, _ in errors.values())
        # Rows of one expert meet in other products, so a sum may have another order.
        if mode == "fp32":
            assert without == pytest.approx(spread, rel=2e-6)
        assert without[:MICRO] == pytest.approx(spread[:MICRO], rel=1e-2)
        assert sum(spread[-2:]) < sum(spread[:2])


WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "Muon": ({"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}, 1e-5),
    "Adamax": ({}, 1e-5),
    # Blocks of 256 elements begin where a rank's experts begin.
    "8bit": ({"precision": {"state": "8bit"}}, 0.05),
    # Experts are rounded on the wire once for two ranks, as their sum leaves.
    "narrow wire": ({"precision": {"reduce": {"wire": "bf16", "when": "last"}}}, 0.05),
}
"""Name -> what of the config makes it, and how far updates may be apart, relative to their size."""


def updates(way: str) -> tuple[dict[str, float], list[str]]:
    """How far masters are from those of a run without, beside how far they came; what differs by stage."""
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
        engine.destroy()
    without, spread, _ = runs
    apart = {}
    for name, value in without.masters.items():
        whole = spread.masters[name]
        came = float((value - first[name].float()).norm())
        apart[name] = float((whole - value).norm()) / came
    return apart, same(runs[1:])


@pytest.mark.parametrize("way", ["Adamax", *(slow(each) for each in WAYS if each != "Adamax")])
@pytest.mark.long
def test_every_update_is_that_of_a_run_without(way: str) -> None:
    for apart, differences in run_ranks(updates, 4, way):
        assert max(apart.values()) < WAYS[way][1], apart
        assert differences == []


# --- what the data does ---------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "all experts of rank 1": {"skew": (0.0, 0.0, 60.0, 60.0)},
    "one expert gets nothing": {"skew": (-60.0, 0.0, 0.0, 0.0)},
    "some tokens go nowhere": {"dropped": 5},
    "no token goes anywhere": {"dropped": 1000},
}


def odd_data(case: str) -> list[tuple[dict[str, float], list[str]]]:
    """With activation checkpointing and without: errors, and what differs from the run without."""
    expected = reference(2, MICRO, **CASES[case])
    found = []
    first: dict[str, torch.Tensor] = {}
    for recompute in (None, False, True):
        engine = engine_of(config(3, "ep2"), recompute=recompute, **CASES[case])
        accumulate(engine, MICRO)
        values = gradients(engine)
        first = first or values
        zero = {row.name: torch.zeros(row.whole_shape) for row in engine.plan.rows}
        errors = {name: error(value, expected.get(name, zero[name])) for name, value in values.items()}
        found.append((errors, [name for name in values if not torch.equal(values[name], first[name])]))
        assert engine.step().updated
        engine.destroy()
    return found


@pytest.mark.parametrize("case", [*list(CASES)[:2], *(slow(each) for each in list(CASES)[2:])])
def test_experts_without_tokens_and_recomputation(case: str) -> None:
    for reports in run_ranks(odd_data, 2, case):
        for errors, differences in reports:
            assert max(errors.values()) < 2e-6, errors
            assert differences == []


def late() -> list[str]:
    """Parameters whose gradient is another one where weight gradients are deferred."""
    found = []
    for deferred in (False, True):
        engine = engine_of(config(3, "ep2"))
        if deferred:
            defer_weight_grads(engine)
        accumulate(engine, MICRO)
        found.append(gradients(engine))
        engine.destroy()
    return [name for name, value in found[0].items() if error(found[1][name], value) > 1e-6]


def test_deferred_weight_gradients() -> None:
    assert run_ranks(late, 2) == [[], []]


def penalised() -> list[str]:
    """Parameters whose gradient is not that of fp64 where the loss has a gradient in it."""

    def loss(call: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = call(x)
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        made: torch.Tensor = out + grad.square().sum()
        return made

    ranks = torch.distributed.get_world_size()
    plain = Network().double()
    for rank in range(ranks):
        (loss(plain, batch(0, rank, 0).double()) / ranks).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    wrong = []
    for stage in (1, 3):
        engine = engine_of(config(stage, "ep2"))
        for _ in range(MICRO):
            engine.backward(loss(engine, batch(0, engine.mesh.rank("data"), 0)))
        found = gradients(engine)
        wrong += [f"{stage} {name}" for name, value in found.items() if error(value, expected[name]) > 1e-5]
        engine.destroy()
    return wrong


def test_a_gradient_in_the_loss_goes_through_exchanges_twice() -> None:
    assert run_ranks(penalised, 2) == [[], []]


def overflow(rank: int) -> tuple[list[bool], list[tuple[str, ...]], list[float]]:
    """fp16: a gradient of one rank's experts is not finite in the first step."""
    engine = engine_of(
        config(3, "ep2 x 2", "fp16", fp16={"enabled": True, "hysteresis": 1, "initial_scale_power": 4})
    )
    skipped, bad, scales = [], [], []
    for step in range(2):
        handles = []
        if step == 0 and engine.mesh.rank() == rank:
            down = engine.module.layers[0].experts.down
            handles = [down.register_hook(lambda grad: torch.full_like(grad, float("inf")))]
        accumulate(engine, MICRO)
        result = engine.step()
        for handle in handles:
            handle.remove()
        skipped.append(result.skipped)
        bad.append(result.bad)
        scales.append(result.loss_scale)
    engine.destroy()
    return skipped, bad, scales


@pytest.mark.parametrize("rank", [1, 2])
def test_what_is_not_finite_on_one_rank_is_found_by_all(rank: int) -> None:
    for skipped, bad, scales in run_ranks(overflow, 4, rank):
        assert skipped == [True, False]
        assert bad[0] == ("layers.0.experts.down",)
        assert scales[1] == scales[0] / 2


# --- what is sent ---------------------------------------------------------------------------------------


def recorded(mesh: str) -> list[tuple[list[Any], list[Any], list[str]]]:
    found = []
    for stage in (0, 1, 3):
        engine = engine_of(config(stage, mesh))
        with engine.comm.record() as log:
            accumulate(engine, MICRO)
            engine.step()
        planned = [(c.op, c.dtype, c.numel, c.axis) for c in collectives(engine.plan)]
        engine.destroy()
        sent = [(c.op, c.dtype, c.numel, c.axis) for c in log if c.op != "all_to_all"]
        found.append((planned, sent, [c.axis for c in log if c.op == "all_to_all"]))
    return found


@pytest.mark.parametrize("mesh", ["ep2 x 2", "ep4", "ep2, 2 replicas"])
def test_what_is_sent_is_the_plan_and_an_exchange_of_tokens(mesh: str) -> None:
    reports = run_ranks(recorded, 4, mesh)
    for planned, sent, exchanges in (report for rank in reports for report in rank):
        assert sent == planned
        # Per layer and micro-batch: counts, tokens there, results back; and back and there again.
        assert exchanges == ["expert"] * (2 * MICRO * 5)


def observed() -> None:
    """Every column of every expert is what the plan says, and the tables show it."""
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
        engine.destroy()


def test_the_observer_sees_the_plan() -> None:
    run_ranks(observed, 4)


# --- values ---------------------------------------------------------------------------------------------


def values(stage: int) -> list[str]:
    """What is read back is what was written, whole, and a copy of the model runs."""
    engine = engine_of(config(stage, "ep2 x 2"))
    before = Network().state_dict()
    assert (
        sum(segment.storage.nbytes for segment in engine.executor.segments) == cost(engine.plan).rest.storage
    )
    wrong = [n for n, value in before.items() if not torch.equal(engine.parameter(n).master, value)]
    train(engine, 1, MICRO, data=batch)
    name = "layers.1.experts.up"
    new = torch.randn(before[name].shape, generator=torch.Generator().manual_seed(9))
    engine.parameter(name).master = new
    wrong += [] if torch.equal(engine.parameter(name).master, new) else ["master"]
    engine.parameter(name).state["exp_avg"] = 2 * new
    wrong += [] if torch.equal(engine.parameter(name).state["exp_avg"], 2 * new) else ["state"]
    accumulate(engine, MICRO)
    engine.parameter(name).gradient = new
    wrong += [] if error(engine.parameter(name).gradient, new) < 1e-6 else ["gradient"]
    engine.zero_grad()
    rank = engine.mesh.rank("expert")
    with engine.gathered([name], write=True) as shown:
        own = shown[name].clone()
        wrong += [] if torch.equal(own, new[2 * rank : 2 * rank + 2]) else ["gathered"]
        if engine.mesh.rank() < 2:
            shown[name].add_(1.0)
    wrong += [] if torch.equal(engine.parameter(name).master, new + 1.0) else ["written"]
    with engine.gathered(), torch.no_grad():
        x = batch(0, engine.mesh.rank("data"), 0)
        twin = copy.deepcopy(engine.module)
        wrong += [] if torch.equal(engine.module(x), twin(x)) else ["copy"]
    module = engine.module.layers[0].experts
    engine.destroy()
    wrong += [] if "forward" not in module.__dict__ else ["left"]
    return wrong


@pytest.mark.parametrize("stage", [0, 3])
def test_values_are_whole(stage: int) -> None:
    assert run_ranks(values, 4, stage) == [[]] * 4


def statistics(stage: int) -> list[tuple[Any, ...]]:
    lines = []
    for experts in (1, 2):
        engine = engine_of(config(stage, "ep2 x 2", "bf16", experts, precision={"statistics": True}))
        accumulate(engine, MICRO)
        engine.step()
        lines.append(engine.update_statistics().lines)
        engine.destroy()
    return lines


@pytest.mark.parametrize("stage", [0, 2])
def test_statistics_are_of_whole_parameters(stage: int) -> None:
    for without, spread in run_ranks(statistics, 4, stage):
        assert [line.name for line in without] == [line.name for line in spread]
        for before, now in zip(without, spread, strict=True):
            assert now.numel == before.numel
            assert now.weight_norm == pytest.approx(before.weight_norm, rel=1e-6)


# --- refusals -------------------------------------------------------------------------------------------


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def refused() -> list[str]:
    told = []
    for model, kind in (
        (nn.ModuleDict({"experts": NoForward()}), ModelError),
        (nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])}), ConfigError),
        (nn.Linear(8, 8), ConfigError),
    ):
        with pytest.raises(kind) as caught:
            make({**written(2, 0), "experts": {"ranks": 2, "parameters": ["*experts.*"]}}, model)
        told.append(str(caught.value))
    return told


def test_what_cannot_be_spread_is_refused_by_name_on_every_rank() -> None:
    for forward, listed, none in run_ranks(refused, 2):
        assert "`experts`: must have a forward of tokens" in forward and "got (x: " in forward
        assert "`experts.0.weight`: must stack all experts" in listed
        assert "`experts.parameters`: must match a parameter" in none
