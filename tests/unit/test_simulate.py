"""Simulations against sums by hand; clusters, and errors in their files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT, LENGTH, VOCABULARY, WIDTH
from tests.unit.models import moe
from tests.unit.refusals import error_of
from zerodrift import (
    ConfigError,
    ModelSpec,
    Plan,
    UnsupportedError,
    build,
    load,
    mesh_for,
    resolve,
)
from zerodrift.api import empty, make_plan
from zerodrift.dtypes import DType
from zerodrift.inspect.simulate import streams
from zerodrift.inspect.simulate.cluster import Cluster, built_in, collective_time, read_cluster
from zerodrift.inspect.simulate.simulation import simulate, sweep
from zerodrift.inspect.simulate.work import CountedOperation, UnitWork, Work, count_work
from zerodrift.model.inputs import Inputs
from zerodrift.pipeline.schedules import timeline
from zerodrift.plan.bill import cost
from zerodrift.plan.schedule import Collective, collectives

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
FAST: dict[str, Any] = {
    "device": {"tflops": {"fp32": 1.0, "bf16": 2.0}, "memory_gb": 1.0, "memory_gb_per_s": 1e9},
    "devices_per_host": 8,
    "host": {"gb_per_s": 1.0},
    "network": {"gb_per_s": 0.5},
}
"""A device whose passes over memory take no time."""


def cluster(**more: Any) -> Cluster:
    return Cluster(**{**FAST, **more})


def plan(world: int = 2, model: ModelSpec | None = None, stage: int = 3, **more: Any) -> Plan:
    written = {"zero_optimization": {"stage": stage}, **more}
    config = load(written)
    mesh = mesh_for(config, world)
    return build(resolve(config, mesh), model or moe(layers=3), mesh)


def unit(flops: int, saved: int = 100, entering: int = 10) -> UnitWork:
    one, two = (CountedOperation(count, DType.FP32, 0) for count in (flops, 2 * flops))
    return UnitWork((Counter({one: 1}),), (Counter({two: 1}),), saved, entering, 0, 0)


NONE = UnitWork(({},), ({},), 0, 0, 0, 0)


def work(made: Plan, flops: int = 10**9) -> Work:
    """Return work in which a forward of a block takes a millisecond on `cluster()`."""
    blocks = {each.name: unit(flops) for each in made.units if each.name}
    return Work(blocks, unit(flops), unit(flops), 8, "8 tokens", DType.FP32)


# --- collectives --------------------------------------------------------------------------------------------


def call(op: Any = "all_gather", numel: int = 1 << 20, axis: Any = "shard", segment: int = 0) -> Collective:
    total = DType.FP32 if op != "all_gather" else None
    return Collective(op, "reduce", DType.FP32, numel, axis, total, segment)


SIZE = 4 << 20
"""Bytes of a call of 2^20 numbers in fp32."""


@pytest.mark.parametrize(
    ("ranks", "hosts", "op", "order", "seconds"),
    [
        (8, 8, "all_gather", "rank", SIZE * 7 / 8 / 1e9),
        (8, 8, "reduce_scatter", "rank", SIZE * 7 / 8 / 1e9),
        (16, 8, "all_gather", "rank", SIZE * 15 / 16 / 1e9),  # a ring: 8 cards of 0.5 GB/s
        (16, 8, "reduce_scatter", "rank", SIZE * 8 / 16 / 0.5e9),  # from all to all
        (16, 8, "reduce_scatter", "native", SIZE * 15 / 16 / 1e9),
        (16, 8, "reduce_scatter", "tree", SIZE * 7 / 8 / 1e9 + SIZE / 16 / 0.5e9),
        (16, 6, "reduce_scatter", "rank", SIZE * 12 / 16 / 0.5e9),  # from the four on the last host
        (16, 6, "reduce_scatter", "tree", SIZE / 2 / 1e9 + SIZE * 7 / 16 / 0.5e9),  # pairs alone share a host
    ],
)
def test_a_collective_takes_what_its_way_takes(
    ranks: int, hosts: int, op: str, order: str, seconds: float
) -> None:
    made = plan(ranks, precision={"reduce": {"order": order}})
    found = collective_time(call(op), made, cluster(devices_per_host=hosts))
    assert found[0] == pytest.approx(seconds)


# --- a step -------------------------------------------------------------------------------------------------


def test_without_communication_a_step_is_what_is_computed() -> None:
    made = plan(1)
    found = simulate(made, work(made), cluster())
    assert found.seconds == pytest.approx(5 * 3e-3, rel=1e-3), "five parts, three forwards' worth each"
    assert found.exposed == 0 and found.wire == 0
    assert found.mfu == pytest.approx(1.0, rel=1e-3)
    assert found.tokens == 8


def test_what_is_recomputed_takes_time_and_no_memory() -> None:
    made = plan(2)
    kept, again = (simulate(made, work(made), cluster(), recompute=each) for each in (False, True))
    assert again.computed - kept.computed == pytest.approx(3e-3, rel=1e-3), "a forward of three blocks"
    assert kept.memory.activations == 5 * 100
    assert again.memory.activations == 3 * 10 + 2 * 100 + 100
    assert kept.memory.plan == cost(made).peak.total
    assert again.mfu < kept.mfu


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_sends_the_plans_list_and_is_computing_and_waiting_and_nothing_else(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(16, stage=stage, sharding={"replicate": 2}, gradient_accumulation_steps=3)
    sent: list[Collective] = []
    monkeypatch.setattr(
        streams, "collective_time", lambda call, *more: (sent.append(call), collective_time(call, *more))[1]
    )
    found = simulate(made, work(made), cluster())
    assert found.seconds == pytest.approx(found.computed + found.exposed) and found.exposed > 0
    assert sent == list(collectives(made))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_pipeline_waits_as_long_as_its_order_says(schedule: str) -> None:
    pipeline = {"stages": 2, "schedule": schedule}
    made = plan(2, moe(layers=4), stage=0, pipeline=pipeline, gradient_accumulation_steps=4)
    order = timeline(made)
    assert order is not None
    blocks = {each.name: unit(10**9) for each in made.units if each.name}
    amount = Work(blocks, NONE, NONE, 8, "8 tokens", DType.FP32)
    fast = cluster(host={"gb_per_s": 1e9})
    found = simulate(made, amount, fast, timeline=order)
    assert found.idle / found.seconds == pytest.approx(order.bubble, rel=0.01)
    assert found.seconds == pytest.approx(found.computed + found.exposed + found.idle)


def test_ranks_that_share_cores_take_longer_and_so_does_computing_beside_a_transfer() -> None:
    made = plan(2)
    slow = {"device": {**FAST["device"], "operation_us": 50.0}}
    slow |= {"host": {"gb_per_s": 1.0, "latency_us": 5.0, "message_us": 1.0}}
    alone, halved = (simulate(made, work(made), cluster(**slow, **more)) for more in ({}, {"cores": 1}))
    assert halved.seconds == pytest.approx(2 * alone.seconds)
    beside = streams.Streams(cluster(compute_beside_link=0.5))
    beside.send(2.0)
    beside.compute(0.5)
    beside.compute(1.0)
    assert beside.now == 2.5


# --- how much a model computes --------------------------------------------------------------------------


def counted(batch: int, **more: Any) -> Work:
    with empty():
        model = GPT(tied=False)
    tokens = torch.zeros(batch, LENGTH, dtype=torch.int64)
    return count_work(
        make_plan({"optimizer": ADAMW, **more}, model), model, Inputs((), {"tokens": tokens}, "few")
    )


def test_products_are_those_of_the_model_by_hand() -> None:
    found, rows = counted(2), 2 * LENGTH
    block = 2 * rows * WIDTH * (3 + 1 + 2 + 2) * WIDTH + 2 * 2 * rows * LENGTH * WIDTH
    assert {name: unit.flops for name, unit in found.blocks.items()} == {"layers.0": block, "layers.1": block}
    assert found.enter.flops == 0
    assert found.leave.flops == 2 * rows * WIDTH * VOCABULARY
    (operations,) = found.blocks["layers.0"].backward
    back = sum(each.flops * count for each, count in operations.items())
    assert back == 2 * block
    assert found.tokens == rows and found.products is DType.FP32
    # What autograd keeps grows with the batch, and what enters is a hidden state.
    one = counted(1)
    for name, unit_ in one.blocks.items():
        assert unit_.entering == LENGTH * WIDTH * 4
        assert found.blocks[name].saved > 1.8 * unit_.saved > 1.8 * unit_.entering
    assert one.leave.saved >= LENGTH * VOCABULARY * 4 * 0.9, "logits"


# --- the sweep ----------------------------------------------------------------------------------------------


def test_a_sweep_ranks_what_fits_and_says_why_others_do_not() -> None:
    written = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}

    def plans(overrides: Any) -> Plan:
        config = load(written, tuple(overrides))
        mesh = mesh_for(config, 16)
        return build(resolve(config, mesh), moe(layers=3), mesh)

    base = plans(())
    peaks = [cost(plans((f"zero_optimization.stage={stage}",))).peak.total for stage in (3, 0)]
    assert peaks[0] < peaks[1]
    room = sum(peaks) / 2e9
    small = cluster(device={**FAST["device"], "memory_gb": room})
    fit, others = sweep(base, plans, lambda made: None, work(base, 10**6), small)
    simulated = [tried.simulation for tried in fit if tried.simulation]
    assert len(simulated) == len(fit) > 0
    assert [each.seconds for each in simulated] == sorted(each.seconds for each in simulated)
    short = [tried for tried in others if tried.simulation]
    assert short and all(tried.simulation and not tried.simulation.memory.fits for tried in short)
    refused = [tried.refused for tried in others if not tried.simulation]
    assert all("must be `rank` with a wire" in text for text in refused) and refused
    assert {tried.choice.recompute for tried in fit} == {False, True}


# --- clusters -------------------------------------------------------------------------------------------


def test_a_cluster_tells_all_that_is_wrong_with_it(tmp_path: Path) -> None:
    path, device = tmp_path / "mine.yaml", "{tflops: {bf16: -1}, memory_gb_per_s: 2, memroy_reached: 0.5}"
    path.write_text(f"device: {device}\ndevices_per_host: 8\nhost: {{gb_per_s: .nan}}\n")
    told = error_of(ConfigError, read_cluster, path)
    for part in (
        "`device.tflops.bf16`: must be a number above 0; got -1",
        "`device.memroy_reached`: must be a key of `device`. Did you mean `memory_reached`?",
        "`device.tflops.fp32`",
        "`host.gb_per_s`: must be a finite number; got nan",
    ):
        assert told.count(part) == 1, told


def test_what_a_cluster_lacks_for_a_plan_is_told() -> None:
    made = plan(16)
    alone = Cluster(**{key: value for key, value in FAST.items() if key != "network"})
    with pytest.raises(ConfigError, match="`network`: must be given for more than the 8 devices"):
        simulate(made, work(made), alone)
    with pytest.raises(ConfigError, match=r"`device\.tflops\.fp16`: must be given"):
        cluster().peak(DType.FP16)
    with pytest.raises(UnsupportedError, match="`backend`"):
        simulate(plan(2, backend="fsdp2"), work(made), cluster())
    assert all(read_cluster(name)[0].source for name in built_in())
    with pytest.raises(ConfigError, match=r"got 'h10'\. Did you mean `h100`"):
        read_cluster("h10")
