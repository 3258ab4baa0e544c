"""What rounding does to updates: two real steps of the plan's optimizer, on a copy.

Invariant: shares are of elements, over all ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace

from zerodrift.engine.engine import Engine
from zerodrift.numerics import signals
from zerodrift.numerics.measure import Bench
from zerodrift.numerics.nouns import UpdateCost
from zerodrift.numerics.runs import running
from zerodrift.optimizers import of_type
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
    """Of the moment that is worst off: the share of elements that, rounded to the nearest, stay as they are
    without a gradient."""
    decays, dtype = _decays(engine.plan.policy), state.dtype.torch
    worst = 0.0
    for moment, value in engine.parameter(name).state.items():
        decay = decays.get(moment)
        if decay is not None and value.numel():
            after = (value * decay).to(dtype).float()
            worst = max(worst, float(((after == value) & (value != 0)).float().mean()))
    return worst


def _decays(policy: Policy) -> dict[str, float]:
    """Moment -> by what it is multiplied in a step."""
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
