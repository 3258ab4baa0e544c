"""Try every stage, wire, order of sums, number of replicas, with and without recomputation.

Invariant: each variant is in the list of those that fit, in the list of those that do not, or refused with
the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zerodrift.errors import ZerodriftError, first_line
from zerodrift.inspect.simulate.cluster import Cluster
from zerodrift.inspect.simulate.simulation import Simulation, simulate
from zerodrift.inspect.simulate.work import Work
from zerodrift.plan.table import Plan
from zerodrift.plan.timeline import Timeline
from zerodrift.policy.nouns import Mode

Plans = Callable[[Sequence[str]], Plan]
"""Overrides of config keys -> the plan with them."""

MOST_REPLICA_COUNTS = 4


@dataclass(frozen=True, slots=True)
class SweepChoice:
    """One value of everything that a sweep varies."""

    stage: int
    wire: str
    order: str
    replicas: int
    recompute: bool

    def overrides(self, base: Plan) -> tuple[str, ...]:
        """Config keys that make the choice; the other keys of `precision.reduce` stay as they are."""
        demanded = {column: value for column, value, _ in base.policy.demands}
        kept = (
            f"{key}: {demanded[name]}" for key in ("sum", "when") if (name := f"reduce.{key}") in demanded
        )
        reduce = ", ".join([f"wire: {self.wire}", f"order: {self.order}", *kept])
        return (
            f"zero_optimization.stage={self.stage}",
            f"precision.reduce={{{reduce}}}",
            f"sharding.replicate={self.replicas}",
        )


@dataclass(frozen=True, slots=True)
class SweepResult:
    choice: SweepChoice
    simulation: Simulation | None
    """None if the choice is refused."""
    refused: str = ""


def sweep(
    base: Plan, plans: Plans, timelines: Callable[[Plan], Timeline | None], work: Work, cluster: Cluster
) -> tuple[list[SweepResult], list[SweepResult]]:
    """Return the results that fit, the fastest first, and those that do not fit or are refused."""
    fit: list[SweepResult] = []
    others: list[SweepResult] = []
    for first, choices in itertools.groupby(
        _choices(base, cluster), lambda one: replace(one, recompute=False)
    ):
        try:
            plan = plans(first.overrides(base))
        except ZerodriftError as error:
            others.append(SweepResult(first, None, first_line(error)))
            continue
        for choice in choices:
            found = simulate(plan, work, cluster, recompute=choice.recompute, timeline=timelines(plan))
            (fit if found.memory.fits else others).append(SweepResult(choice, found))
    fit.sort(key=lambda one: one.simulation.seconds if one.simulation else 0.0)
    others.sort(key=lambda one: one.simulation.memory.total if one.simulation else float("inf"))
    return fit, others


def _choices(base: Plan, cluster: Cluster) -> Iterator[SweepChoice]:
    mode = base.policy.mode
    wires = ("fp32", "bf16" if mode is Mode.FP32 else str(mode.dtype))
    for stage, wire, order in itertools.product(range(4), wires, ("rank", "tree", "native")):
        for replicas in _replica_counts(base.mesh.data, cluster) if stage else (1,):
            for recompute in (False, True):
                yield SweepChoice(stage, wire, order, replicas, recompute)


def _replica_counts(data: int, cluster: Cluster) -> list[int]:
    """One shard over all ranks, over a host, and sizes in between."""
    counts, shard = [1], cluster.devices_per_host
    while shard < data and len(counts) < MOST_REPLICA_COUNTS:
        if data % shard == 0:
            counts.append(data // shard)
        shard *= 4
    return counts
