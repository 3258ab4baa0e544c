"""Recommend pins within a budget of bytes, and measure what may be narrower.

Parameters are pinned by module; modules whose paths differ in numbers alone are pinned together, so a rule is
one line. They are tried in the order of their worth per element that computes in fp32, because a product in
fp32 is slower on every device. More are added until enough of the measured drift is gone, then those that are
not needed are left out. In a mode without autocast, the same is tried under autocast.

Invariant: every point of the curve is a run of the plan with these pins; every change by a narrower column
is one of real steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from zerodrift.engine.engine import Engine
from zerodrift.inspect.audit.estimates import AuditSetup, gradient_distances
from zerodrift.inspect.audit.results import ByteKind, Bytes, NarrowerColumn, Point, Recommendation
from zerodrift.inspect.audit.run import REFUSED, plan_for, running
from zerodrift.inspect.audit.signals import Signals, backward_signals, drift
from zerodrift.inspect.audit.variants import literal_glob, narrow_cells, pinned_policy
from zerodrift.plan.cost import cost
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Mode, Output, Policy
from zerodrift.policy.resolve import SAFE_MODULES
from zerodrift.policy.rules import glob

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
    grouped: dict[str, list[tuple[str, int, float]]] = {}
    for row in plan.rows:
        if row.columns.compute.is_floating:
            path = re.sub(r"\d+", "*", row.name.rpartition(".")[0])
            narrow = {"storage", "compute"} & set(narrow_cells(row.columns))
            square = worth.get(row.name, 0.0) if narrow else 0.0
            grouped.setdefault(path, []).append((row.name, row.whole_numel, square))
    made = []
    for found in grouped.values():
        names = tuple(name for name, _, _ in found)
        numel, square = sum(count for _, count, _ in found), sum(value for _, _, value in found)
        if square > 0:
            made.append(Candidate(_pattern(plan, names), names, numel, square))
    return sorted(made, key=lambda candidate: -candidate.density)


def _pattern(plan: Plan, names: Sequence[str]) -> str:
    """One glob for exactly these parameters, or the first name if there is none."""
    folded = {re.sub(r"\d+", "*", name) for name in names}
    paths = {name.rpartition(".")[0] for name in folded}
    for pattern in (*(folded if len(folded) == 1 else ()), *(f"{path}.*" for path in paths)):
        found = {row.name for row in plan.rows if any(map(glob(pattern), row.names))}
        if found == set(names) and not re.search(r"[\[\]?]", pattern):
            return pattern
    return names[0]


def rules_for(point: Point) -> tuple[Mapping[str, str], ...]:
    """Rules to paste under `precision.rules`."""
    rules: list[Mapping[str, str]] = []
    for pattern, names, output in point.pins:
        whole = all(map(glob(pattern), names))
        returned = {} if output is None else {"output": str(output)}
        for match in [pattern] if whole else map(literal_glob, names):
            rules.append({"match": match, "pin": "fp32", **returned})
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

    def point(self, mode: Mode, taken: Sequence[Candidate]) -> Point | None:
        """Measure a point; None if the model cannot run so."""
        names = {name: candidate.output for candidate in taken for name in candidate.names}
        run, billed = (replace(self.plan, policy=_in_mode(p, mode)) for p in (self.plan.policy, self.whole))
        try:
            seen = self.setup.signals(pinned_policy(run, names))
            plan = plan_for(self.setup.subject, pinned_policy(billed, names), self.setup.mesh)
        except REFUSED:
            return None  # an output does not fit what comes after it
        pins = tuple((candidate.pattern, candidate.names, candidate.output) for candidate in taken)
        return Point(str(mode), pins, drift(seen, self.reference), bytes_of(plan))

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
        points = [start]
        for mode in (own, AUTOCAST[own]) if own in AUTOCAST else (own,):
            if mode is not own:
                last = self.point(mode, [])
                if last is None or not self._fits(last, start):
                    continue
                points.append(last)
            taken, measured = self._add(mode, found, goal, start)
            points += measured
            if measured and measured[-1].drift.square <= goal:
                points += self._prune(mode, taken, goal, start)
        enough = [point for point in points if point.drift.square <= goal]
        if enough:
            chosen = min(enough, key=lambda point: (point.bytes.compute, len(point.pins)))
        else:
            chosen = min(points, key=lambda point: point.drift.square)
        index, rules = points.index(chosen), rules_for(chosen)
        return Recommendation(self.budget, self.of, (*points, widest), widest, index, rules)

    def _fits(self, point: Point, start: Point) -> bool:
        return getattr(point.bytes, self.of) <= getattr(start.bytes, self.of) * (1 + self.budget)

    def _add(
        self, mode: Mode, found: Sequence[Candidate], goal: float, start: Point
    ) -> tuple[list[Candidate], list[Point]]:
        """Pin more candidates until enough of the drift is gone: one at a time at first, then twice as many
        each time. Where the model cannot run with the outputs of their kind, they return their input's
        dtype."""
        taken: list[Candidate] = []
        points: list[Point] = []
        steps = _steps(len(found))
        for number, (low, high) in enumerate(steps):
            self.progress(f"pins, mode {mode}", number, len(steps))
            added = list(found[low:high])
            point = self.point(mode, [*taken, *added])
            if point is None:
                added = [replace(candidate, output="input") for candidate in added]
                point = self.point(mode, [*taken, *added])
            if point is not None and self._fits(point, start):
                taken += added
                points.append(point)
                if point.drift.square <= goal:
                    break
        return taken, points

    def _prune(self, mode: Mode, taken: Sequence[Candidate], goal: float, start: Point) -> list[Point]:
        """Leave out pins that are not needed, the most elements first."""
        kept, points = list(taken), []
        for number, candidate in enumerate(sorted(taken, key=lambda one: -one.numel)[:STEPS]):
            self.progress(f"pins less, mode {mode}", number, min(len(taken), STEPS))
            fewer = [one for one in kept if one is not candidate]
            point = self.point(mode, fewer)
            if point is not None and point.drift.square <= goal and self._fits(point, start):
                kept = fewer
                points.append(point)
        return points


def _in_mode(policy: Policy, mode: Mode) -> Policy:
    """The same policy in its mode, or under autocast to the same dtype."""
    if mode is policy.mode:
        return policy
    forward = ("storage", "gather", "compute", "master")
    demands = tuple(demand for demand in policy.demands if demand[0] not in forward)
    return replace(policy, mode=mode, demands=demands, safe=SAFE_MODULES)


def _steps(count: int) -> list[tuple[int, int]]:
    """Bounds of the candidates that are added together."""
    steps: list[tuple[int, int]] = []
    low, size = 0, 1
    while low < count:
        high = count if len(steps) == STEPS - 1 else min(count, low + size)
        steps.append((low, high))
        low = high
        if len(steps) >= STEPS // 2:
            size *= 2
    return steps


def take_steps(engine: Engine, setup: AuditSetup, count: int) -> None:
    """Take real optimizer steps on a copy."""
    for _ in range(count):
        backward_signals(engine, setup.batches)
        engine.step()


def narrower_columns(setup: AuditSetup, plan: Plan, whole: Policy) -> list[NarrowerColumn]:
    """Measure a bf16 wire and 8-bit moments, where they are wide now and the plan admits them narrow."""
    updates = [row.columns.update for row in plan.rows if row.columns.update is not None]
    found = []
    wide_wire = any(str(update.reduce.wire) == "fp32" for update in updates)
    if wide_wire and setup.mesh.data > 1 and not whole.tree:
        found.append(_measure(setup, whole, "reduce", "reduce.wire", "bf16"))
    if any(str(update.state) == "fp32" for update in updates) and whole.optimizer is not None:
        found.append(_measure(setup, whole, "state", "state", "8bit"))
    return [one for one in found if one is not None]


def _measure(setup: AuditSetup, policy: Policy, column: str, key: str, value: str) -> NarrowerColumn | None:
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
    return NarrowerColumn(column, value, middle, worst, changes.get(worst, 0.0), many, before, after)


def _update_distances(setup: AuditSetup, asked: Policy, policy: Policy, steps: int = 3) -> dict[str, float]:
    """Parameter -> distance of where it arrives under two policies over how far it goes under the second."""
    with running(setup.subject, replace(policy, schedule=None), setup.mesh) as engine:

        def master(name: str) -> Tensor:
            return engine.parameter(name).master.cpu()

        ends = {row.name: master(row.name) for row in engine.plan.rows if row.trained}
        take_steps(engine, setup, steps)
        lengths = {}
        for name, start in ends.items():  # one at a time: a start is dropped where its end is known
            ends[name] = master(name)
            lengths[name] = float((ends[name] - start).norm())
    with running(setup.subject, replace(asked, schedule=None), setup.mesh) as engine:
        take_steps(engine, setup, steps)
        return {
            name: float((engine.parameter(name).master.cpu() - end).norm()) / (lengths[name] or math.inf)
            for name, end in ends.items()
        }
