"""The counted cost of a step is the sum over its collectives; units are gathered ahead as memory allows."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.models import moe, parameter
from zerodrift import ConfigError, MeshShape, ModelSpec, Plan, build, cost, load, make_plan, mesh_for, resolve
from zerodrift.plan.bill import sent_bytes, stage_cost
from zerodrift.plan.schedule import (
    collectives,
    count_collectives,
    most_gathered_bytes,
    prefetch_budget,
    prefetch_ends,
)

KEEPS = (None, "never", "micro-batch", "step")
WHENS = (None, "last", "every")
STACKS = [parameter(f"model.layers.{i}.mlp.experts.up", (4, 8, 16)) for i in range(3)]
EXPERTS = ModelSpec("stacked", (parameter("model.embed.weight", (32, 8)), *STACKS))


def plan(stage: int, world: int = 2, model: ModelSpec | None = None, **rest: Any) -> Plan:
    written: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **rest}
    return make_plan(written, model or moe(layers=4), world)


def plans() -> Iterator[tuple[str, Plan]]:
    for stage, (place, keep) in itertools.product(range(4), enumerate(KEEPS)):
        when = WHENS[(stage + place) % len(WHENS)]  # any two of the three meet
        label, shape = f"stage {stage}, {keep}, {when}", {"keep_gathered": keep}
        rest = {"precision": {"reduce": {"when": when}}}
        yield label, plan(stage, sharding=shape, **rest)
        yield f"{label}, replicas", plan(stage, 4, sharding={"replicate": 2, **shape}, **rest)
        yield f"{label}, experts", plan(stage, 4, EXPERTS, experts={"ranks": 2}, sharding=shape, **rest)
        for schedule in ("gpipe", "zbv") if keep == "step" else ():
            block = {"stages": 2, "schedule": schedule}
            yield f"{label}, {schedule}", plan(stage, 4, pipeline=block, sharding=shape, **rest)
    nested = [parameter(f"layers.{i}.{name}", (8, 8)) for i in range(3) for name in ("a.w", "mlp.b.w", "c")]
    units = {"units": ["layers.*", "layers.*.mlp"]}
    yield "nested", plan(3, 2, ModelSpec("nested", tuple(nested)), sharding=units)


def bill(calls: Iterator[tuple[Any, int]], mesh: MeshShape) -> Counter[tuple[str, ...]]:
    found: Counter[tuple[str, ...]] = Counter()
    for call, times in calls:
        key = (call.op, call.purpose, str(call.dtype), call.axis)
        found[(*key, "count")] += times
        found[(*key, "bytes")] += times * sent_bytes(call, mesh)
    return found


@pytest.mark.long
def test_what_is_counted_is_what_is_walked() -> None:
    for label, made in plans():
        for stage, count in itertools.product(range(made.mesh.pipeline), (1, 2, 5)):
            walked = Counter(collectives(made, stage, count))
            folded: Counter[Any] = Counter()
            for call, times in count_collectives(made, stage, count):
                folded[call] += times
            assert folded == walked, label
            found = stage_cost(made, stage, count).traffic
            priced = {
                (*key, what): value
                for line in found
                for key in [(line.op, line.purpose, line.dtype, line.axis)]
                for what, value in (("count", line.count), ("bytes", line.bytes))
            }
            assert priced == bill(((call, 1) for call in collectives(made, stage, count)), made.mesh), label


def test_any_number_of_micro_batches_units_and_ranks_is_counted_at_once() -> None:
    count, before = 2**31 - 1, time.process_time()
    for stage in (0, 3):
        made = plan(stage, gradient_accumulation_steps=count)
        lines = (cost(made, number).traffic for number in (count, 7, 8))
        for line, seven, eight in zip(*lines, strict=True):
            assert line.count == seven.count + (count - 7) * (eight.count - seven.count)
            assert line.bytes == seven.bytes + (count - 7) * (eight.bytes - seven.bytes)
    stacked = [parameter(f"layers.{i}.mlp.weight", (64, 64)) for i in range(1000)]
    made = plan(3, 10**6, ModelSpec("deep", tuple(stacked)))
    assert cost(made, 10**6).wire > 0
    assert time.process_time() - before < 4


def test_no_number_of_micro_batches_is_an_error() -> None:
    for count in (0, True, 2.5, "3", float("nan")):
        with pytest.raises(ConfigError, match=r"`micro_batches`: must be a whole number of at least 1"):
            cost(plan(3), count)  # type: ignore[arg-type]


# --- units that are gathered ahead ------------------------------------------------------------------------


def blocks_of(sizes: list[int], **sharding: Any) -> Plan:
    """Return a plan of blocks with so many KiB of bf16 each, on two ranks."""
    sharding = {"units": ["layers.*"], **sharding}
    config = load({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "sharding": sharding})
    mesh = mesh_for(config, 2)
    parameters = [parameter(f"layers.{number}.w", (size, 512)) for number, size in enumerate(sizes)]
    return build(resolve(config, mesh), ModelSpec("blocks", tuple(parameters)), mesh)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 120))
def test_one_is_always_ahead_and_no_more_than_fit(sizes: list[int], space: int) -> None:
    ends = prefetch_ends(sizes, space)
    assert list(ends) == sorted(ends)
    for place, end in enumerate(ends):
        assert min(place + 2, len(sizes)) <= end
        assert end <= place + 2 or sum(sizes[place:end]) <= space
        assert end == len(sizes) or sum(sizes[place : end + 1]) > space
    pairs = max((sum(sizes[place : place + 2]) for place in range(len(sizes))), default=0)
    assert most_gathered_bytes(sizes, space) <= max(pairs, space)


def test_the_config_says_how_much_else() -> None:
    made = blocks_of([8, 1, 1, 1, 1, 8, 8, 1])
    assert cost(made).peak.gathered == prefetch_budget(made) == 16 << 10, "two neighbours"
    near, far = blocks_of([8, 4, 4, 4], prefetch=1), blocks_of([8, 4, 4, 4], prefetch=20 << 10)
    assert cost(near).peak.gathered == 12 << 10 and cost(far).peak.gathered == 20 << 10
    assert near.digest != far.digest
    assert any(decision.key == "prefetch" for decision in far.policy.decisions)
    with pytest.raises(ConfigError, match=r"sharding\.prefetch"):
        blocks_of([8], prefetch=0)
