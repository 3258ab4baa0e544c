"""Take real optimizer steps on a copy: what rounding does to updates, and what narrower columns would do.

Invariant: every number comes from real steps, and shares are of elements over all ranks.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

from torch import Tensor

from zerodrift.engine.engine import Engine
from zerodrift.inspect.audit.estimates import AuditSetup, gradient_distances
from zerodrift.inspect.audit.pins import bytes_of
from zerodrift.inspect.audit.results import Narrower, UpdateCost
from zerodrift.inspect.audit.run import REFUSED, plan_for, running
from zerodrift.inspect.audit.signals import backward_signals
from zerodrift.optimizers import of_type
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Policy, State

MANY = 0.05
"""Relative change from which a parameter is counted."""


def _take_steps(engine: Engine, setup: AuditSetup, count: int) -> None:
    for _ in range(count):
        backward_signals(engine, setup.batches)
        engine.step()


# --- what rounding does to updates --------------------------------------------------------------------------


def update_costs(setup: AuditSetup, policy: Policy) -> list[UpdateCost]:
    """Measure two steps of every trained parameter; nothing without an optimizer of the plan's own."""
    if policy.optimizer is None:
        return []
    watched = replace(policy, statistics=True, schedule=None)
    with running(setup.subject, watched, setup.mesh) as engine:
        _take_steps(engine, setup, 2)
        if not engine.global_steps:
            return []  # every step was skipped: gradients that are not finite are found elsewhere
        costs = []
        for line in engine.update_statistics().lines:
            row = engine.plan.row(line.name)
            update = None if row is None else row.columns.update
            state = State.FP32 if update is None else update.state
            stuck = _stuck_share(engine, line.name) if state is State.BF16 else 0.0
            costs.append(UpdateCost(line.name, line.lost_share, line.underflow_share, stuck, str(state)))
        return costs


def _stuck_share(engine: Engine, name: str) -> float:
    """Share of elements that decay leaves as they are, rounded to nearest; of the worst moment."""
    decays, worst = _decays(engine.plan.policy), 0.0
    for moment, value in engine.parameter(name).state.items():
        decay = decays.get(moment)
        if decay is not None and value.numel():
            after = (value * decay).to(State.BF16.dtype.torch).float()
            worst = max(worst, float(((after == value) & (value != 0)).float().mean()))
    return worst


def _decays(policy: Policy) -> dict[str, float]:
    """Moment -> its factor in a step."""
    if policy.optimizer is None:
        return {}
    algorithm = of_type(policy.optimizer.type)
    given = {**algorithm.defaults, **json.loads(policy.optimizer.params)}
    if algorithm.moments == ("momentum_buffer",):
        return {"momentum_buffer": float(given.get("momentum", 0.0))}
    first, second = (float(beta) for beta in given.get("betas", (0.9, 0.999)))
    if algorithm.moments == ("exp_avg",):  # Lion blends with the first, and keeps by the second
        return {"exp_avg": second}
    return {"exp_avg": first, "exp_avg_sq": second}


# --- what narrower columns would do -------------------------------------------------------------------------


def narrower_columns(setup: AuditSetup, plan: Plan, whole: Policy) -> list[Narrower]:
    """Measure a bf16 wire and 8-bit moments, where they are wide now and the plan admits them narrow."""
    updates = [row.columns.update for row in plan.rows if row.columns.update is not None]
    found = []
    wide_wire = any(str(update.reduce.wire) == "fp32" for update in updates)
    if wide_wire and setup.mesh.data > 1 and not whole.tree:
        found.append(_measure(setup, whole, "reduce", "reduce.wire", "bf16"))
    if any(str(update.state) == "fp32" for update in updates) and whole.optimizer is not None:
        found.append(_measure(setup, whole, "state", "state", "8bit"))
    return [one for one in found if one is not None]


def _measure(setup: AuditSetup, policy: Policy, column: str, key: str, value: str) -> Narrower | None:
    """None if the plan does not admit the value."""
    demands = tuple(demand for demand in policy.demands if demand[0] != key)
    asked = replace(policy, demands=(*demands, (key, value, "the audit")))
    try:
        before, after = (bytes_of(plan_for(setup.subject, each, setup.mesh)) for each in (policy, asked))
        if column == "reduce":
            without = (replace(each, optimizer=None) for each in (asked, policy))
            changes = gradient_distances(setup, *without)
        else:
            changes = _update_distances(setup, asked, policy)
    except REFUSED:
        return None
    worst = max(changes, key=lambda name: changes[name], default="")
    middle = sorted(changes.values())[len(changes) // 2] if changes else 0.0
    many = sum(change > MANY for change in changes.values())
    return Narrower(column, value, middle, worst, changes.get(worst, 0.0), many, before, after)


def _update_distances(setup: AuditSetup, asked: Policy, policy: Policy, steps: int = 3) -> dict[str, float]:
    """Parameter -> distance of where it arrives under two policies over how far it goes under the second."""
    with running(setup.subject, replace(policy, schedule=None), setup.mesh) as engine:

        def master(name: str) -> Tensor:
            return engine.parameter(name).master.cpu()

        ends = {row.name: master(row.name) for row in engine.plan.rows if row.trained}
        _take_steps(engine, setup, steps)
        lengths = {}
        for name, start in ends.items():  # one at a time: a start is dropped where its end is known
            ends[name] = master(name)
            lengths[name] = float((ends[name] - start).norm())
    with running(setup.subject, replace(asked, schedule=None), setup.mesh) as engine:
        _take_steps(engine, setup, steps)
        return {
            name: float((engine.parameter(name).master.cpu() - end).norm()) / (lengths[name] or math.inf)
            for name, end in ends.items()
        }
