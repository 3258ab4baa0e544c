"""What rounding does to updates: two real steps of the plan's optimizer, on a copy.

Invariant: shares are of elements, over all ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from zerodrift.drift import signals
from zerodrift.drift.measure import Bench
from zerodrift.drift.nouns import UpdateCost
from zerodrift.drift.runs import running
from zerodrift.engine.engine import Engine
from zerodrift.policy.nouns import Policy, State
from zerodrift.report.updates import UpdateLine

STEPS = 2


def costs(bench: Bench, policy: Policy) -> list[UpdateCost]:
    """Of every trained parameter; none where the plan has no optimizer of its own."""
    if policy.optimizer is None:
        return []
    watched = replace(policy, statistics=True, schedule=None)
    with running(bench.subject, watched, bench.mesh) as engine:
        for _ in range(STEPS):
            signals.trained_signals(engine, bench.batches)
            engine.step()
        if not engine.global_steps:
            return []  # every step was skipped: gradients that are not finite are told elsewhere
        report = engine.update_statistics()
        return [_cost(engine, line) for line in report.lines]


def _cost(engine: Engine, line: UpdateLine) -> UpdateCost:
    row = engine.plan.row(line.name)
    update = None if row is None else row.columns.update
    state = State.FP32 if update is None else update.state
    stuck = _stuck(engine, line.name, state) if state is State.BF16 else 0.0
    return UpdateCost(line.name, line.lost_share, line.underflow_share, stuck, str(state))


def _stuck(engine: Engine, name: str, state: State) -> float:
    """The share of elements whose last moment, rounded to the nearest, stays as it is without a gradient."""
    moments = dict(engine.parameter(name).state)
    if not moments:
        return 0.0
    decay = _decays(engine.plan.policy).get(list(moments)[-1])
    last = moments[list(moments)[-1]]
    if decay is None or not last.numel():
        return 0.0
    dtype = state.dtype.torch
    after = (last * decay).to(dtype).float()
    return float(((after == last) & (last != 0)).float().mean())


def _decays(policy: Policy) -> dict[str, float]:
    """Moment -> by what it is multiplied in a step."""
    given: dict[str, Any] = {} if policy.optimizer is None else json.loads(policy.optimizer.params)
    first, second = given.get("betas", (0.9, 0.999))
    return {"exp_avg": float(first), "exp_avg_sq": float(second), "square_avg": given.get("alpha", 0.99)}
