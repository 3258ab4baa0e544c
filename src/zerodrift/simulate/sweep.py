"""Which stage, wire, order of sums, number of replicas, recomputation or not: each is planned and played.

Invariant: a way that is not in the table of those that fit is in that of those that do not, with what it
needs, or is told as refused with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zerodrift.errors import ZerodriftError, first_line
from zerodrift.plan.table import Plan
from zerodrift.plan.timeline import Timeline
from zerodrift.policy.nouns import Mode
from zerodrift.simulate.cluster import Cluster
from zerodrift.simulate.simulation import Simulation, simulate
from zerodrift.simulate.work import Work

Plans = Callable[[Sequence[str]], Plan]
"""Overrides of config keys -> the plan with them."""
Timelines = Callable[[Plan], "Timeline | None"]
MOST_SHARDS = 4
"""Numbers of replicas that are tried."""


@dataclass(frozen=True, slots=True)
class Way:
    """One choice of what the sweep varies."""

    stage: int
    wire: str
    order: str
    """Of the sums over ranks: `rank`, `tree` or `native`."""
    replicas: int
    recompute: bool

    def overrides(self, base: Plan) -> tuple[str, ...]:
        """The keys that make it, beside those that the config sets anyway."""
        demanded = {column: value for column, value, _ in base.policy.demands}
        kept = [
            f"{key}: {demanded[f'reduce.{key}']}" for key in ("sum", "when") if f"reduce.{key}" in demanded
        ]
        reduce = ", ".join([f"wire: {self.wire}", f"order: {self.order}", *kept])
        return (
            f"zero_optimization.stage={self.stage}",
            f"precision.reduce={{{reduce}}}",
            f"sharding.replicate={self.replicas}",
        )


@dataclass(frozen=True, slots=True)
class Tried:
    """A way, and what came of it."""

    way: Way
    simulation: Simulation | None
    """None where it is refused."""
    refused: str = ""


def sweep(
    base: Plan, plans: Plans, timelines: Timelines, work: Work, cluster: Cluster
) -> tuple[list[Tried], list[Tried]]:
    """Those that fit, the fastest first, and those that do not or are refused."""
    fit: list[Tried] = []
    others: list[Tried] = []
    for made, ways in itertools.groupby(_ways(base, cluster), key=lambda way: replace(way, recompute=False)):
        try:
            plan = plans(made.overrides(base))
        except ZerodriftError as error:
            others.append(Tried(made, None, first_line(error)))
            continue
        for way in ways:
            found = simulate(plan, work, cluster, recompute=way.recompute, timeline=timelines(plan))
            (fit if found.memory.fits else others).append(Tried(way, found))
    fit.sort(key=lambda tried: _of(tried).seconds)
    others.sort(key=lambda tried: tried.simulation.memory.total if tried.simulation else float("inf"))
    return fit, others


def _of(tried: Tried) -> Simulation:
    if tried.simulation is None:
        raise AssertionError("refused")
    return tried.simulation


def _ways(base: Plan, cluster: Cluster) -> Iterator[Way]:
    wires = {Mode.FP32: ("fp32", "bf16")}.get(base.policy.mode, ("fp32", str(base.policy.mode.dtype)))
    for stage, wire, order in itertools.product(range(4), wires, ("rank", "tree", "native")):
        for replicas in _replicas(base.mesh.data, cluster) if stage else (1,):
            for recompute in (False, True):
                yield Way(stage, wire, order, replicas, recompute)


def _replicas(data: int, cluster: Cluster) -> list[int]:
    """One shard over all ranks, over a host, and some in between."""
    found, shard = [1], cluster.devices_per_host
    while shard < data and len(found) < MOST_SHARDS:
        if data % shard == 0:
            found.append(data // shard)
        shard *= 4
    return found
