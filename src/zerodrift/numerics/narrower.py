"""The question the other way round: what may be narrower, and what it would do to gradients and updates.

Invariant: every number is of real steps, beside the same steps with the column as planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from zerodrift.engine.engine import Engine
from zerodrift.numerics import signals
from zerodrift.numerics.measure import Bench, gradient_apart
from zerodrift.numerics.nouns import Narrower
from zerodrift.numerics.recommend import bytes_of
from zerodrift.numerics.runs import REFUSED, planned, running
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Policy

STEPS = 3
"""Optimizer steps that updates are compared over."""

WORTH_SAYING = 0.05
"""Of a norm: what is told of a parameter by name."""


def narrower(bench: Bench, plan: Plan, whole: Policy) -> list[Narrower]:
    """What a bf16 wire would do to gradients, and 8-bit moments to updates; only what is wide now, and what
    the plan admits."""
    found = []
    wires = {str(row.columns.update.reduce.wire) for row in plan.rows if row.columns.update is not None}
    if "fp32" in wires and bench.mesh.data > 1 and not whole.tree:
        wire = _asked(whole, "reduce.wire", "bf16")
        found.append(_measured("reduce", "bf16", bench, whole, wire, _gradients))
    states = {str(row.columns.update.state) for row in plan.rows if row.columns.update is not None}
    if "fp32" in states and whole.optimizer is not None:
        found.append(_measured("state", "8bit", bench, whole, _asked(whole, "state", "8bit"), _updates))
    return [one for one in found if one is not None]


def _asked(policy: Policy, column: str, value: str) -> Policy:
    """The same, where the column of every parameter has a value unless a rule says otherwise."""
    others = tuple(demand for demand in policy.demands if demand[0] != column)
    return replace(policy, demands=(*others, (column, value, "the audit")))


def _measured(
    column: str,
    value: str,
    bench: Bench,
    policy: Policy,
    asked: Policy,
    apart: Callable[[Bench, Policy, Policy], dict[str, float]],
) -> Narrower | None:
    """None where the plan does not admit it."""
    try:
        plans = [planned(bench.subject, each, bench.mesh) for each in (policy, asked)]
        lines = apart(bench, asked, policy)
    except REFUSED:
        return None
    before, after = map(bytes_of, plans)
    worst = max(lines, key=lambda name: lines[name], default="")
    middle = sorted(lines.values())[len(lines) // 2] if lines else 0.0
    many = sum(change > WORTH_SAYING for change in lines.values())
    return Narrower(column, value, middle, worst, lines.get(worst, 0.0), many, before, after)


def _gradients(bench: Bench, asked: Policy, policy: Policy) -> dict[str, float]:
    return gradient_apart(bench, replace(asked, optimizer=None), replace(policy, optimizer=None))


def _updates(bench: Bench, asked: Policy, policy: Policy) -> dict[str, float]:
    """Parameter -> how far it comes to be from where it would, over how far it goes."""
    ends, ways = _ends_and_ways(bench, policy)
    with running(bench.subject, replace(asked, schedule=None), bench.mesh) as engine:
        _steps(engine, bench)
        return {
            name: float((engine.parameter(name).master.cpu() - end).norm()) / (ways[name] or math.inf)
            for name, end in ends.items()
        }


def _ends_and_ways(bench: Bench, policy: Policy) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Where every trained parameter comes to be, and how far that is from where it began."""
    with running(bench.subject, replace(policy, schedule=None), bench.mesh) as engine:
        ends = {row.name: engine.parameter(row.name).master.cpu() for row in engine.plan.rows if row.trained}
        _steps(engine, bench)
        ways = {}
        for name, start in ends.items():  # one at a time: a start is let go where its end is known
            ends[name] = engine.parameter(name).master.cpu()
            ways[name] = float((ends[name] - start).norm())
    return ends, ways


def _steps(engine: Engine, bench: Bench) -> None:
    for _ in range(STEPS):
        signals.trained_signals(engine, bench.batches)
        engine.step()
