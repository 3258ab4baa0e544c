"""Pins under a budget of bytes: most of the drift for the least.

Parameters are pinned by module, and modules whose paths differ in numbers alone are pinned together, so that
a rule is one line. They are tried in the order of what they are worth for each element that computes in fp32:
bytes at rest may cost nothing, but a product in fp32 is slower than one in 16 bits, on every device. More
and more are taken until enough of the measured drift is gone, then those that it does not need are left out.
In a mode without autocast the same is tried under autocast, where what meets no matrix stays in fp32.

Invariant: every point of the curve is a run of the plan with these pins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zerodrift.numerics import variants
from zerodrift.numerics.measure import Bench
from zerodrift.numerics.nouns import Bytes, Point, Recommendation
from zerodrift.numerics.runs import REFUSED, planned
from zerodrift.numerics.signals import Signals, drift
from zerodrift.plan.cost import cost
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Mode, Output, Policy
from zerodrift.policy.resolve import SAFE_MODULES
from zerodrift.policy.rules import glob

ENOUGH = 0.9
"""Of the squared drift that pinning everything removes: what a recommendation stops at."""

POINTS = 10
"""Steps in which candidates are tried, at most, in each mode."""

Told = Callable[[str, int, int], None]
"""(what is done, how many of it are, of how many)."""

ByteKind = Literal["rest", "peak", "wire"]
"""Bytes of a plan that a budget is of."""

AUTOCAST = {Mode.BF16: Mode.AUTOCAST_BF16, Mode.FP16: Mode.AUTOCAST_FP16}


@dataclass(frozen=True, slots=True)
class Candidate:
    """Parameters that are pinned together."""

    pattern: str
    names: tuple[str, ...]
    numel: int
    square: float
    """What they are worth, by replay where there was one, else by estimate."""
    output: Output | None = None
    """What their modules return; None for what a module of their kind does."""

    @property
    def density(self) -> float:
        return self.square / self.numel


def candidates(plan: Plan, worth: Mapping[str, float]) -> list[Candidate]:
    """Modules that have something narrow in their forward, what is worth most for an element first."""
    grouped: dict[str, list[str]] = {}
    elements: dict[str, int] = {}
    squares: dict[str, float] = {}
    for row in plan.rows:
        if not row.columns.compute.is_floating:
            continue
        path = re.sub(r"\d+", "*", row.name.rpartition(".")[0])
        grouped.setdefault(path, []).append(row.name)
        elements[path] = elements.get(path, 0) + row.whole_numel
        narrow = set(variants.narrow_cells(row.columns)) & set(variants.FORWARD)
        squares[path] = squares.get(path, 0.0) + (worth.get(row.name, 0.0) if narrow else 0.0)
    made = [
        Candidate(_pattern(plan, names), tuple(names), elements[path], squares[path])
        for path, names in grouped.items()
        if squares[path] > 0
    ]
    return sorted(made, key=lambda candidate: -candidate.density)


def _pattern(plan: Plan, names: Sequence[str]) -> str:
    """One glob for exactly these parameters, or the first name where there is none."""
    folded = {re.sub(r"\d+", "*", name) for name in names}
    paths = {name.rpartition(".")[0] for name in folded}
    wanted = set(names)
    for pattern in (*(folded if len(folded) == 1 else ()), *(f"{path}.*" for path in paths)):
        found = {row.name for row in plan.rows if any(glob(pattern)(name) for name in row.names)}
        if found == wanted and not re.search(r"[\[\]?]", pattern):
            return pattern
    return names[0]


def rules_for(point: Point) -> tuple[Mapping[str, str], ...]:
    """What is pasted under `precision.rules`."""
    rules: list[Mapping[str, str]] = []
    for pattern, names, output in point.pins:
        whole = all(glob(pattern)(name) for name in names)
        matches = [pattern] if whole else [variants.literal(name) for name in names]
        returned = {} if output is None else {"output": str(output)}
        rules += [{"match": match, "pin": "fp32", **returned} for match in matches]
    return tuple(rules)


def bytes_of(plan: Plan) -> Bytes:
    bill = cost(plan)
    compute = sum(row.numel * row.columns.compute.size for row in plan.rows)
    return Bytes(bill.rest.total, bill.peak.total, bill.wire, compute)


@dataclass(frozen=True, slots=True)
class Search:
    """What points are measured with."""

    bench: Bench
    plan: Plan
    """What was run, without an optimizer."""
    whole: Policy
    """The same with it, for the bytes."""
    reference: Signals
    budget: float
    of: ByteKind

    def point(self, mode: Mode, taken: Sequence[Candidate]) -> Point | None:
        """A measured one; None where the model cannot be run so."""
        names = {name: candidate.output for candidate in taken for name in candidate.names}
        run, billed = (replace(self.plan, policy=in_mode(p, mode)) for p in (self.plan.policy, self.whole))
        try:
            seen = self.bench.signals(variants.pinned(run, names))
            bill = bytes_of(planned(self.bench.subject, variants.pinned(billed, names), self.bench.mesh))
        except REFUSED:
            return None  # what one of them returns does not fit what comes after it
        pins = tuple((candidate.pattern, candidate.names, candidate.output) for candidate in taken)
        return Point(str(mode), pins, drift(seen, self.reference), bill)

    def within(self, point: Point, first: Point) -> bool:
        return getattr(point.bytes, self.of) <= getattr(first.bytes, self.of) * (1 + self.budget)


def recommend(search: Search, first: Signals, found: Sequence[Candidate], told: Told) -> Recommendation:
    """Measured points from the plan as it is to everything pinned, and the one to take."""
    own = search.plan.policy.mode
    modes = [own, *([AUTOCAST[own]] if own in AUTOCAST else [])]
    told("pins", 0, 1)
    start = search.point(own, [])
    if start is None:
        raise AssertionError(f"the plan was run in mode {own}, and cannot be run again")
    start = replace(start, drift=drift(first, search.reference))
    everything = tuple(row.name for row in search.plan.rows if row.columns.compute.is_floating)
    widest = search.point(own, [Candidate("*", everything, 1, 0.0)]) or start
    goal = start.drift.square - ENOUGH * (start.drift.square - widest.drift.square)
    points = [start]
    for mode in modes:
        last = start if mode is own else search.point(mode, [])
        if last is None or not search.within(last, start):
            continue
        points += [last] * (mode is not own)
        taken, measured = _taken(search, mode, found, goal, start, told)
        points += measured
        if measured and measured[-1].drift.square <= goal:
            points += _pruned(search, mode, taken, goal, start, told)
    enough = [point for point in points if point.drift.square <= goal]
    chosen = (
        min(enough, key=lambda point: (point.bytes.compute, len(point.pins)))
        if enough
        else min(points, key=lambda point: point.drift.square)
    )
    points.append(widest)
    return Recommendation(
        search.budget, search.of, tuple(points), widest, points.index(chosen), rules_for(chosen)
    )


def _taken(
    search: Search, mode: Mode, found: Sequence[Candidate], goal: float, start: Point, told: Told
) -> tuple[list[Candidate], list[Point]]:
    """More and more candidates until enough of the drift is gone."""
    taken: list[Candidate] = []
    points: list[Point] = []
    steps = _steps(len(found), POINTS)
    for number, (low, high) in enumerate(steps):
        told(f"pins, mode {mode}", number, len(steps))
        point, added = _tried(search, mode, taken, found[low:high])
        if point is None or not search.within(point, start):
            continue
        taken += added
        points.append(point)
        if point.drift.square <= goal:
            break
    return taken, points


def _pruned(
    search: Search, mode: Mode, taken: Sequence[Candidate], goal: float, start: Point, told: Told
) -> list[Point]:
    """Without what is not needed for it, what computes most in fp32 first."""
    kept, points = list(taken), []
    for number, candidate in enumerate(sorted(taken, key=lambda one: -one.numel)[:POINTS]):
        told(f"pins less, mode {mode}", number, min(len(taken), POINTS))
        fewer = [one for one in kept if one is not candidate]
        point = search.point(mode, fewer)
        if point is not None and point.drift.square <= goal and search.within(point, start):
            kept = fewer
            points.append(point)
    return points


def _tried(
    search: Search, mode: Mode, taken: Sequence[Candidate], more: Sequence[Candidate]
) -> tuple[Point | None, list[Candidate]]:
    """With more pins, each returning what its kind does, or, where the model cannot be run so, its input's
    dtype."""
    added = list(more)
    point = search.point(mode, [*taken, *added])
    if point is None:
        added = [replace(candidate, output="input") for candidate in more]
        point = search.point(mode, [*taken, *added])
    return point, added


def in_mode(policy: Policy, mode: Mode) -> Policy:
    """The same policy in its mode, or under autocast to the same dtype."""
    if mode is policy.mode:
        return policy
    forward = ("storage", "gather", "compute", "master")
    demands = tuple(demand for demand in policy.demands if demand[0] not in forward)
    return replace(policy, mode=mode, demands=demands, safe=SAFE_MODULES)


def _steps(count: int, most: int) -> list[tuple[int, int]]:
    """Which candidates are tried together: one at first, then twice as many each time."""
    steps: list[tuple[int, int]] = []
    low, size = 0, 1
    while low < count:
        high = count if len(steps) == most - 1 else min(count, low + size)
        steps.append((low, high))
        low = high
        if len(steps) >= most // 2:
            size *= 2
    return steps
