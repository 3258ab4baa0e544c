"""Units are gathered ahead as far as memory allows, and at least one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.models import parameter
from zerodrift import ConfigError, ModelSpec, Plan, build, cost, load, mesh_for, resolve
from zerodrift.plan.schedule import gathered_bytes, most_gathered_bytes, prefetch_budget, prefetch_ends


def plan(sizes: list[int], **sharding: Any) -> Plan:
    """Return a plan of blocks with so many KiB of bf16 each, on two ranks."""
    sharding = {"units": ["layers.*"], **sharding}
    config = load({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "sharding": sharding})
    mesh = mesh_for(config, 2)
    parameters = [parameter(f"layers.{number}.w", (size, 512)) for number, size in enumerate(sizes)]
    return build(resolve(config, mesh), ModelSpec("blocks", tuple(parameters)), mesh)


def test_as_many_are_gathered_ahead_as_fit() -> None:
    assert prefetch_ends([4, 1, 1, 1, 4, 4], 5) == (2, 4, 4, 5, 6, 6)
    assert prefetch_ends([4, 1, 1, 1, 4, 4], 8) == (4, 5, 5, 5, 6, 6)
    assert prefetch_ends([], 8) == ()


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


def test_by_default_the_peak_is_that_of_two_neighbours() -> None:
    made = plan([8, 1, 1, 1, 1, 8, 8, 1])
    sizes = [gathered_bytes(made, unit) for unit in made.units if unit.name]
    assert [size >> 10 for size in sizes] == [8, 1, 1, 1, 1, 8, 8, 1]
    assert prefetch_budget(made) == 16 << 10
    assert cost(made).peak.gathered == 16 << 10
    assert prefetch_ends(sizes, prefetch_budget(made)) == (5, 6, 6, 6, 6, 7, 8, 8)


def test_the_config_says_how_much_else() -> None:
    near, far = plan([8, 4, 4, 4], prefetch=1), plan([8, 4, 4, 4], prefetch=20 << 10)
    assert cost(near).peak.gathered == 12 << 10 and cost(far).peak.gathered == 20 << 10
    assert near.digest != far.digest
    assert any(decision.key == "prefetch" for decision in far.policy.decisions)
    with pytest.raises(ConfigError, match=r"sharding\.prefetch"):
        plan([8], prefetch=0)


def test_another_backend_refuses_it() -> None:
    config = load({"backend": "fsdp2", "zero_optimization": {"stage": 3}, "sharding": {"prefetch": 5}})
    with pytest.raises(ConfigError, match=r"sharding\.prefetch"):
        resolve(config, mesh_for(config, 2))
