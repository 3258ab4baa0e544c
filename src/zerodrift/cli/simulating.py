"""`plan --simulate`: what a step is made from, and a cluster, to a text.

Invariant: nothing is started, and no weights are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerodrift.cli import streams
from zerodrift.errors import ConfigError
from zerodrift.legible import legible

if TYPE_CHECKING:
    from zerodrift.inspect.simulate.simulation import Plans
    from zerodrift.plan.table import Plan
    from zerodrift.plan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepSource:
    """What a step is made from."""

    plans: Plans
    model: str
    timeline: Callable[[Plan], Timeline | None]
    """The order of a pipeline."""
    tokens: int | None = None
    """Of a sample, where a job says it."""
    recompute: bool | None = None
    """Where a job says it."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What is typed beside `--simulate`."""

    cluster: str
    sweep: bool
    tokens: int | None
    recompute: bool
    inputs: str | None
    json: bool


def simulated(step: StepSource, options: SimulationOptions) -> str:
    """What is printed."""
    from zerodrift.inspect.simulate.cluster import built_in, read_cluster
    from zerodrift.inspect.simulate.simulation import require_known_order, simulate, sweep
    from zerodrift.inspect.simulate.text import simulation_json, simulation_text, sweep_json, sweep_text
    from zerodrift.inspect.simulate.work import count_work, sized_inputs
    from zerodrift.model.inputs import inputs_for
    from zerodrift.model.sources import build_runnable

    cluster, path = read_cluster(options.cluster)
    if step.recompute is not None and options.recompute:
        do = "Override the job's: `--set model.activation_checkpointing=true`."
        raise ConfigError(
            "--recompute", "must be left out with a job, which says it", got="a job file", do=do
        )
    length = None if options.inputs is not None else options.tokens or step.tokens
    if length is None and options.inputs is None:
        raise ConfigError(
            "--tokens", "must say how many tokens a sample has", got="none", do="Or give a job file."
        )
    plan = step.plans(())
    timeline = step.timeline(plan)
    require_known_order(plan, cluster, timeline)
    samples = max(1, plan.policy.batch.micro)
    module = build_runnable(step.model)
    given = inputs_for(module, options.inputs) if length is None else sized_inputs(module, samples, length)
    work = count_work(plan, module, given)
    if options.cluster in built_in():
        print(f"zerodrift: cluster {options.cluster} is {legible(str(path))}", file=sys.stderr)
    if options.sweep:
        fit, others = sweep(plan, step.plans, step.timeline, work, cluster)
        if options.json:
            return sweep_json(options.cluster, fit, others)
        return sweep_text(plan, work, options.cluster, fit, others, color=streams.color())
    again = options.recompute if step.recompute is None else step.recompute
    found = simulate(plan, work, cluster, recompute=again, timeline=timeline)
    if options.json:
        return simulation_json(plan, work, options.cluster, found)
    return simulation_text(plan, work, options.cluster, found, color=streams.color())
