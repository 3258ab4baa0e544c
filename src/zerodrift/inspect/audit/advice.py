"""Recommend pins within a budget of bytes, and measure what may be narrower.

Modules whose paths differ in numbers alone are pinned together, so a rule is one line. They are tried in the
order of their worth per element that computes in fp32, in the plan's mode and then under autocast.

Invariant: every point of the curve is a run of the plan with these pins; every change by a narrower column
is one of real steps.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zerodrift.engine import Engine
from zerodrift.inspect.audit.estimates import AuditSetup, gradient_distances
from zerodrift.inspect.audit.results import ByteKind, Bytes, NarrowerColumn, Point, Recommendation
from zerodrift.inspect.audit.run import REFUSED, plan_for, running
from zerodrift.inspect.audit.signals import Signals, backward_signals, drift
from zerodrift.inspect.audit.variants import autocast_policy, literal_glob, narrow_cells, pinned_policy
from zerodrift.plan import Plan, Row, cost
from zerodrift.policy import Mode, Output, Policy, glob

MANY = 0.05  # relative change from which a parameter is counted
ENOUGH = 0.9  # share of the removable squared drift that a recommendation stops at
STEPS = 10  # most steps in which candidates are added, and most of them left out again, in each mode

Progress = Callable[[str, int, int], None]  # (what is done, how many of it are, of how many)
AUTOCAST = {Mode.BF16: Mode.AUTOCAST_BF16, Mode.FP16: Mode.AUTOCAST_FP16}


@dataclass(frozen=True, slots=True)
class Candidate:
    """Parameters that are pinned together."""

    pattern: str
    names: tuple[str, ...]
    numel: int
    square: float  # squared drift, by replay if there was one, else by estimate
    output: Output | None = None  # output of their modules; None for that of their kind

    @property
    def density(self) -> float:
        return self.square / self.numel


def candidates(plan: Plan, worth: Mapping[str, float]) -> list[Candidate]:
    """Modules with something narrow in their forward, by worth per element."""
    grouped: dict[str, list[Row]] = {}
    for row in plan.rows:
        if row.columns.compute.is_floating:
            grouped.setdefault(re.sub(r"\d+", "*", row.name.rpartition(".")[0]), []).append(row)
    made = []
    for rows in grouped.values():
        narrow = [row.name for row in rows if {"storage", "compute"} & set(narrow_cells(row.columns))]
        square = sum(worth.get(name, 0.0) for name in narrow)
        if square > 0:
            names, numel = tuple(row.name for row in rows), sum(row.whole_numel for row in rows)
            made.append(Candidate(pattern_of(plan, names), names, numel, square))
    return sorted(made, key=lambda candidate: -candidate.density)


def pattern_of(plan: Plan, names: Sequence[str]) -> str:
    """One glob for exactly these parameters, or the first name if there is none."""
    folded = {re.sub(r"\d+", "*", name) for name in names}
    paths = dict.fromkeys(name.rpartition(".")[0] for name in (*folded, *names))
    for pattern in (*(folded if len(folded) == 1 else ()), *(f"{path}.*" for path in paths)):
        found = {row.name for row in plan.rows if any(map(glob(pattern), row.names))}
        if found == set(names) and not re.search(r"[\[\]?]", pattern):
            return pattern
    return names[0]


def matches_of(pattern: str, names: Sequence[str]) -> list[str]:
    """Return globs for rules about these parameters: the pattern, if it matches all of them."""
    return [pattern] if all(map(glob(pattern), names)) else list(map(literal_glob, names))


def rules_for(point: Point) -> tuple[Mapping[str, str], ...]:
    rules: list[Mapping[str, str]] = []
    for pattern, names, output in point.pins:
        returned = {} if output is None else {"output": str(output)}
        rules += [{"match": match, "pin": "fp32", **returned} for match in matches_of(pattern, names)]
    return tuple(rules)


def bytes_of(plan: Plan) -> Bytes:
    bill = cost(plan)
    compute = sum(row.numel * row.columns.compute.size for row in plan.rows)
    return Bytes(bill.rest.total, bill.peak.total, bill.wire, compute)


@dataclass(frozen=True, slots=True)
class PinSearch:
    """A search for pins, from the plan as it was run."""

    setup: AuditSetup
    plan: Plan
    whole: Policy  # the policy with its optimizer, for the bytes
    reference: Signals
    budget: float
    of: ByteKind
    progress: Progress

    def point(self, mode: Mode, taken: Sequence[Candidate], most: float = math.inf) -> Point | None:
        """Measure a point; None if the model cannot run so, or if its bytes are more than `most`."""
        names = {name: candidate.output for candidate in taken for name in candidate.names}
        policies = [self.plan.policy, self.whole]
        if mode is not self.plan.policy.mode:  # under autocast to the same dtype
            policies = [autocast_policy(policy, mode) for policy in policies]
        run, billed = (replace(self.plan, policy=policy) for policy in policies)
        try:
            seen = self.setup.signals(pinned_policy(run, names))
            plan = plan_for(self.setup.subject, pinned_policy(billed, names), self.setup.mesh)
        except REFUSED:
            return None  # an output does not fit what comes after it
        pins = tuple((candidate.pattern, candidate.names, candidate.output) for candidate in taken)
        point = Point(str(mode), pins, drift(seen, self.reference), bytes_of(plan))
        return point if getattr(point.bytes, self.of) <= most else None

    def recommend(self, first: Signals, found: Sequence[Candidate]) -> Recommendation:
        """Measure points from the plan as it is to everything pinned, and choose one."""
        own = self.plan.policy.mode
        self.progress("pins", 0, 1)
        start = self.point(own, [])
        if start is None:
            raise AssertionError(f"the plan was run in mode {own}, and cannot be run again")
        start = replace(start, drift=drift(first, self.reference))
        everything = tuple(row.name for row in self.plan.rows if row.columns.compute.is_floating)
        widest = self.point(own, [Candidate("*", everything, 1, 0.0)]) or start
        goal = start.drift.square - ENOUGH * (start.drift.square - widest.drift.square)
        most = getattr(start.bytes, self.of) * (1 + self.budget)
        points = [start, *self._pin(own, found, goal, most)]
        if own in AUTOCAST and (bare := self.point(AUTOCAST[own], [], most)) is not None:
            points += [bare, *self._pin(AUTOCAST[own], found, goal, most)]
        enough = [point for point in points if point.drift.square <= goal]
        chosen = min(points, key=lambda point: point.drift.square)
        chosen = min(enough, key=lambda point: (point.bytes.compute, len(point.pins)), default=chosen)
        index, rules = points.index(chosen), rules_for(chosen)
        return Recommendation(self.budget, self.of, (*points, widest), widest, index, rules)

    def _pin(self, mode: Mode, found: Sequence[Candidate], goal: float, most: float) -> list[Point]:
        """Pin more candidates until enough of the drift is gone, then leave out those that are not needed.

        One is added at a time at first, then twice as many each time. Where the model cannot run with the
        outputs of their kind, they return their input's dtype. The most elements are left out first.
        """
        kept: list[Candidate] = []
        points: list[Point] = []
        steps = _steps(len(found))
        for number, (low, high) in enumerate(steps):
            self.progress(f"pins, mode {mode}", number, len(steps))
            added = list(found[low:high])
            point = self.point(mode, [*kept, *added])
            if point is None:
                added = [replace(candidate, output="input") for candidate in added]
                point = self.point(mode, [*kept, *added])
            if point is not None and getattr(point.bytes, self.of) <= most:
                kept += added
                points.append(point)
                if point.drift.square <= goal:
                    break
        largest = sorted(kept, key=lambda one: -one.numel)[:STEPS]
        for number, candidate in enumerate(largest if points and points[-1].drift.square <= goal else ()):
            self.progress(f"pins less, mode {mode}", number, len(largest))
            fewer = [one for one in kept if one is not candidate]
            point = self.point(mode, fewer, most)
            if point is not None and point.drift.square <= goal:
                kept = fewer
                points.append(point)
        return points


def _steps(count: int) -> list[tuple[int, int]]:
    """Bounds of the candidates that are added together."""
    sizes = [2 ** max(0, number - STEPS // 2 + 1) for number in range(STEPS - 1)]
    ends = [min(count, end) for end in itertools.accumulate(sizes)]
    return [(low, high) for low, high in itertools.pairwise([0, *ends, count]) if low < high]


def take_steps(engine: Engine, setup: AuditSetup, count: int) -> None:
    for _ in range(count):
        backward_signals(engine, setup.batches)
        engine.step()


def narrower_columns(setup: AuditSetup, plan: Plan, whole: Policy) -> list[NarrowerColumn]:
    """Measure a bf16 wire and 8-bit moments, where they are wide now and the plan admits them narrow."""
    updates = [row.columns.update for row in plan.rows if row.columns.update is not None]
    asked = []
    if (
        any(str(each.reduce.wire) == "fp32" for each in updates)
        and setup.mesh.data > 1
        and not whole.requires_tree
    ):
        asked.append(("reduce", "reduce.wire", "bf16"))
    if any(str(each.state) == "fp32" for each in updates) and whole.optimizer is not None:
        asked.append(("state", "state", "8bit"))
    found = []
    for column, key, value in asked:
        demands = tuple(demand for demand in whole.demands if demand[0] != key)
        narrow = replace(whole, demands=(*demands, (key, value, "the audit")))
        try:
            before, after = (bytes_of(plan_for(setup.subject, p, setup.mesh)) for p in (whole, narrow))
            if column == "reduce":
                without = (replace(policy, optimizer=None) for policy in (narrow, whole))
                changes = gradient_distances(setup, *without)
            else:
                changes = _update_distances(setup, narrow, whole)
        except REFUSED:
            continue  # the plan does not admit the value
        worst = max(changes, key=lambda name: changes[name], default="")
        middle = sorted(changes.values())[len(changes) // 2] if changes else 0.0
        many = sum(change > MANY for change in changes.values())
        most = changes.get(worst, 0.0)
        found.append(NarrowerColumn(column, value, middle, worst, most, many, before, after))
    return found


def _update_distances(setup: AuditSetup, asked: Policy, policy: Policy, steps: int = 3) -> dict[str, float]:
    """Parameter -> distance of where it arrives under two policies over how far it goes under the second."""
    with running(setup.subject, replace(policy, schedule=None), setup.mesh) as engine:
        trained = [row.name for row in engine.plan.rows if row.trained]
        ends = {name: engine.parameter(name).master.cpu() for name in trained}
        take_steps(engine, setup, steps)
        lengths = {}
        for name, start in ends.items():  # one at a time: a start is dropped where its end is known
            ends[name] = engine.parameter(name).master.cpu()
            lengths[name] = float((ends[name] - start).norm())
    with running(setup.subject, replace(asked, schedule=None), setup.mesh) as engine:
        take_steps(engine, setup, steps)
        return {
            name: float((engine.parameter(name).master.cpu() - end).norm()) / (lengths[name] or math.inf)
            for name, end in ends.items()
        }
