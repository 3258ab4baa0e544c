"""Recommend pins within a budget of bytes, and narrow formats within a limit on the drift from fp32.

Modules whose paths differ only in numbers are one group. Groups are pinned in the order of their worth per
element, in the plan's mode and then under autocast. Each format is first run alone for each group. Then
formats are added, first those that save most bytes for the squared drift that they add. The rules of a format
are read as the config reads them.

Invariant: every point is a run of the plan with the rules that are printed. No name of a module matters.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zerodrift.config import load
from zerodrift.engine import Engine
from zerodrift.errors import ConfigError, ZerodriftError, first_line
from zerodrift.inspect.audit import results, variants
from zerodrift.inspect.audit.estimates import AuditSetup, gradient_distances
from zerodrift.inspect.audit.results import FormatPoint, FormatTrial, Point
from zerodrift.inspect.audit.runs import REFUSED, Drift, Signals, backward_signals, drift, plan_for, running
from zerodrift.mesh import MeshShape
from zerodrift.plan import Plan, Row, cost
from zerodrift.policy import PIN, Columns, Mode, Output, Policy, ResolvedRule, glob, is_by_rule, resolve

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
    output: Output | None = None  # output of their modules; None for the default


def candidates(plan: Plan, worth: Mapping[str, float]) -> list[Candidate]:
    """Return groups of modules with a narrow forward, the largest worth per element first."""
    grouped: dict[str, list[Row]] = {}
    for row in plan.rows:
        if row.columns.compute.is_floating:
            grouped.setdefault(re.sub(r"\d+", "*", row.name.rpartition(".")[0]), []).append(row)
    made = []
    for rows in grouped.values():
        narrow = (row for row in rows if {"storage", "compute"} & {*variants.narrow_cells(row.columns)})
        square = sum(worth.get(row.name, 0.0) for row in narrow)
        if square > 0:
            names, numel = tuple(row.name for row in rows), sum(row.whole_numel for row in rows)
            made.append(Candidate(pattern_of(plan, names), names, numel, square))
    return sorted(made, key=lambda one: -one.square / one.numel)


def pattern_of(plan: Plan, names: Sequence[str]) -> str:
    """Return a glob for exactly these parameters, or the first name if there is none."""
    folded = {re.sub(r"\d+", "*", name) for name in names}
    paths = dict.fromkeys(name.rpartition(".")[0] for name in (*folded, *names))
    for pattern in (*(folded if len(folded) == 1 else ()), *(f"{path}.*" for path in paths)):
        found = {row.name for row in plan.rows if any(map(glob(pattern), row.names))}
        if found == set(names) and not re.search(r"[\[\]?]", pattern):
            return pattern
    return names[0]


def matches_of(pattern: str, names: Sequence[str]) -> list[str]:
    """Return globs for rules about these parameters: the pattern, if it matches all of them."""
    return [pattern] if all(map(glob(pattern), names)) else list(map(variants.literal_glob, names))


def rules_for(point: Point) -> tuple[Mapping[str, str], ...]:
    rules: list[Mapping[str, str]] = []
    for pattern, names, output in point.pins:
        returned = {} if output is None else {"output": str(output)}
        rules += [{"match": match, "pin": "fp32", **returned} for match in matches_of(pattern, names)]
    return tuple(rules)


def bytes_of(setup: AuditSetup, policy: Policy) -> results.Bytes:
    """Count the bytes of the model under a policy without running it."""
    plan = plan_for(setup.subject, policy, setup.mesh)
    bill = cost(plan)
    compute = sum(row.numel * row.columns.compute.size for row in plan.rows)
    return results.Bytes(bill.rest.total, bill.peak.total, bill.wire, compute)


@dataclass(frozen=True, slots=True)
class Trials:
    """Runs of the plan with more rules."""

    setup: AuditSetup
    plan: Plan  # the plan that was run
    whole: Policy  # the plan's policy with its optimizer, for the bytes
    reference: Signals
    start: FormatPoint  # the plan as it is
    progress: Progress

    def bytes(self, rules: Sequence[ResolvedRule], mode: Mode | None = None) -> results.Bytes:
        return bytes_of(self.setup, _changed(self.whole, rules, mode))

    def drift(self, rules: Sequence[ResolvedRule], mode: Mode | None = None) -> Drift:
        return drift(self.setup.signals(_changed(self.plan.policy, rules, mode)), self.reference)

    def point(self, rules: Sequence[ResolvedRule], mode: Mode | None = None) -> FormatPoint | None:
        """Measure a trial, or return None if the plan or the model does not admit the rules."""
        try:
            return FormatPoint(self.drift(rules, mode), self.bytes(rules, mode))
        except REFUSED:
            return None


def _changed(policy: Policy, rules: Sequence[ResolvedRule], mode: Mode | None) -> Policy:
    """Add rules, and change the mode to autocast to the same dtype."""
    other = policy if mode in (None, policy.mode) else variants.autocast_policy(policy, mode)
    return variants.with_rules(other, rules)


@dataclass(frozen=True, slots=True)
class PinSearch:
    """A search for pins."""

    trials: Trials
    budget: float
    of: results.ByteKind

    def point(self, mode: Mode, taken: Sequence[Candidate], most: float = math.inf) -> Point | None:
        """Measure pins. Return None if the model cannot run with them, or for more bytes than `most`."""
        named = [(name, candidate.output) for candidate in taken for name in candidate.names]
        rules = [variants.make_rule(name, dict(PIN), pin=True, output=output) for name, output in named]
        point = self.trials.point(rules, mode)
        if point is None or getattr(point.bytes, self.of) > most:
            return None
        pins = tuple((candidate.pattern, candidate.names, candidate.output) for candidate in taken)
        return Point(str(mode), pins, point.drift, point.bytes)

    def recommend(self, found: Sequence[Candidate]) -> results.Recommendation:
        """Measure points from the plan as it is to everything pinned, and choose one."""
        plan, first = self.trials.plan, self.trials.start
        own = plan.policy.mode
        self.trials.progress("pins", 0, 1)
        start = Point(str(own), (), first.drift, first.bytes)
        everything = tuple(row.name for row in plan.rows if row.columns.compute.is_floating)
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
        return results.Recommendation(self.budget, self.of, (*points, widest), widest, index, rules)

    def _pin(self, mode: Mode, found: Sequence[Candidate], goal: float, most: float) -> list[Point]:
        """Pin more candidates until enough of the drift is gone, then leave out those that are not needed.

        At first one candidate is added at a time, then twice as many each time. If the model cannot run with
        the default outputs of their modules, the modules return their input's dtype. The candidates with most
        elements are left out first.
        """
        kept: list[Candidate] = []
        points: list[Point] = []
        # Bounds of the candidates that are added together.
        sizes = (2 ** max(0, number - STEPS // 2 + 1) for number in range(STEPS - 1))
        ends = [min(len(found), end) for end in itertools.accumulate(sizes)]
        pairs = itertools.pairwise([0, *ends, len(found)])
        steps = [(low, high) for low, high in pairs if low < high]
        for number, (low, high) in enumerate(steps):
            self.trials.progress(f"pins, mode {mode}", number, len(steps))
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
            self.trials.progress(f"pins less, mode {mode}", number, len(largest))
            fewer = [one for one in kept if one is not candidate]
            point = self.point(mode, fewer, most)
            if point is not None and point.drift.square <= goal:
                kept = fewer
                points.append(point)
        return points


def take_steps(engine: Engine, setup: AuditSetup, count: int) -> None:
    for _ in range(count):
        backward_signals(engine, setup.batches)
        engine.step()


def narrower_columns(setup: AuditSetup, plan: Plan, whole: Policy) -> list[results.NarrowerColumn]:
    """Measure a bf16 wire and 8-bit moments if they are fp32 now and the plan admits the change."""
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
            before, after = (bytes_of(setup, policy) for policy in (whole, narrow))
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
        found.append(results.NarrowerColumn(column, value, middle, worst, most, many, before, after))
    return found


def _update_distances(setup: AuditSetup, asked: Policy, policy: Policy) -> dict[str, float]:
    """Return by parameter the distance between its values after three steps under two policies, over the
    length of those steps under the second."""
    with running(setup.subject, replace(policy, schedule=None), setup.mesh) as engine:
        trained = [row.name for row in engine.plan.rows if row.trained]
        ends = {name: engine.parameter(name).master.cpu() for name in trained}
        take_steps(engine, setup, 3)
        lengths = {}
        for name, start in ends.items():  # one at a time, to hold only one set of values
            ends[name] = engine.parameter(name).master.cpu()
            lengths[name] = float((ends[name] - start).norm())
    with running(setup.subject, replace(asked, schedule=None), setup.mesh) as engine:
        take_steps(engine, setup, 3)
        return {
            name: float((engine.parameter(name).master.cpu() - end).norm()) / (lengths[name] or math.inf)
            for name, end in ends.items()
        }


FORMATS: Mapping[results.FormatColumn, tuple[str, ...]] = {
    "gather": ("int8", "fp8", "mxfp8"),
    "storage": ("nf4", "int8", "fp8"),
    "compute": ("fp8",),
}
"""Column -> words of the formats that are tried in it."""

TIMES = 1.5  # multiple of the plan's own drift that is the limit by default


def parse_goal(text: str, where: str = "narrow") -> results.FormatGoal:
    """Parse a goal with a limit or without: `bytes`, `speed:2x`, `bytes:0.01`."""
    word, _, limit = text.strip().lower().partition(":")
    times = limit.endswith("x")
    try:
        value = float(limit.removesuffix("x")) if limit or text.strip().endswith(":") else TIMES
    except ValueError:
        value = math.nan
    if word not in ("bytes", "speed") or not 0 < value < math.inf:
        must = "must be bytes or speed, with a limit after a colon or without: bytes:2x, bytes:0.01"
        raise ConfigError(where, must, got=repr(text))
    return results.FormatGoal("bytes" if word == "bytes" else "speed", value, times or not limit)


@dataclass(frozen=True, slots=True)
class FormatSearch:
    """A search for narrow formats."""

    runs: Trials
    goal: results.FormatGoal

    def recommend(self) -> results.FormatAdvice:
        """Run every group in every format, then add groups until the limit."""
        goal, start = self.goal, self.runs.start
        limit = goal.limit * start.drift.rms if goal.is_multiple else goal.limit
        trials = self._asked()
        for number, trial in enumerate(trials):
            self.runs.progress("narrow formats, alone", number, len(trials))
            trials[number] = trial if trial.left_out else self._alone(trial)
        chosen = self._add(trials, limit)
        most = self._everything(trials, chosen)
        rules = tuple(rule for number in chosen for rule in trials[number].rules)
        last = (trials[chosen[-1]].together if chosen else None) or start
        return results.FormatAdvice(goal, limit, start, tuple(trials), tuple(chosen), last, most, rules)

    def _asked(self) -> list[FormatTrial]:
        """Return a trial of every group of matrices in every format, none of them run."""
        groups: dict[tuple[str, results.FormatColumn, str], list[Row]] = {}
        for row in self.runs.plan.rows:
            if row.columns.compute.is_floating and len(row.shape) > 1:
                path = re.sub(r"\d+", "*", row.name.rpartition(".")[0])
                column: results.FormatColumn = "gather" if row.trained else "storage"
                column = "compute" if self.goal.of == "speed" else column
                groups.setdefault((path, column, _reason_against(row.columns, column)), []).append(row)
        trials = []
        for (_, column, reason), rows in groups.items():
            names = tuple(row.name for row in rows)
            numel = sum(row.whole_numel for row in rows)
            for word in FORMATS[column][: 1 if reason else None]:
                rules = _rules(self.runs.plan, rows, column, word)
                pattern = rules[0]["match"] if len(rules) == 1 else pattern_of(self.runs.plan, names)
                trials.append(FormatTrial(pattern, names, column, word, numel, rules, left_out=reason))
        return trials

    def _alone(self, trial: FormatTrial) -> FormatTrial:
        """Run a trial with everything else as planned, unless it saves nothing or is not admitted."""
        try:
            rules = _resolved(trial.rules)
            after = self.runs.bytes(rules)
            if reason := self._useless(trial.column, after):
                return replace(trial, left_out=reason)
            return replace(trial, alone=FormatPoint(self.runs.drift(rules), after))
        except REFUSED as error:
            return replace(trial, left_out=f"refused by the plan ({_reason(error)})")

    def _useless(self, column: results.FormatColumn, after: results.Bytes) -> str:
        """Return why a format saves no bytes; `""` if it does, or is for speed."""
        before = self.runs.start.bytes
        if self.goal.of == "speed":
            return ""
        if column == "gather" and after.wire >= before.wire:
            alone = self.runs.plan.mesh.world == 1
            where = "one rank sends nothing; start more with torchrun"
            return f"because {where if alone else 'it saves no bytes on the wire'}"
        saves = after.sum < before.sum
        return "" if saves else "because it takes more bytes at rest than it saves on the wire"

    def _add(self, trials: list[FormatTrial], limit: float) -> list[int]:
        """Add formats, or replace those that save less, while the drift stays within the limit."""
        chosen: list[int] = []
        left = {n for n, one in enumerate(trials) if one.alone is not None and one.alone.drift.rms <= limit}
        count = len(left)

        def worth(number: int) -> tuple[float, float]:
            """Return the saved bytes, or the elements in narrow products, per squared drift, and in all."""
            before = next((n for n in chosen if trials[n].names == trials[number].names), None)
            old = self.runs.start if before is None else trials[before].alone
            new = trials[number].alone
            assert new is not None and old is not None, "a trial that was chosen was run"
            saved = old.bytes.sum - new.bytes.sum
            if self.goal.of == "speed":
                saved = trials[number].numel if before is None else 0
            added = new.drift.square - max(old.drift.square, self.runs.start.drift.square)
            return (saved / added if added > 0 else math.inf, saved)

        while left:
            self.runs.progress("narrow formats, together", count - len(left), count)
            left = {number for number in left if worth(number)[1] > 0}
            if not left:
                break
            number = max(left, key=lambda n: (worth(n), -n))
            left.remove(number)
            added = [n for n in chosen if trials[n].names != trials[number].names] + [number]
            point = self._point([trials[n] for n in added])
            trials[number] = replace(trials[number], together=point)
            if point is not None and point.drift.rms <= limit:
                chosen = added
        return chosen

    def _everything(self, trials: Sequence[FormatTrial], chosen: Sequence[int]) -> FormatPoint | None:
        """Run every group in the format that saves most, unless that is what was chosen."""
        most: dict[tuple[str, ...], tuple[int, int]] = {}  # names of a group -> bytes, and which trial
        for number, trial in enumerate(trials):
            if trial.alone is not None:
                mine = trial.alone.bytes.sum, number
                most[trial.names] = min(mine, most.get(trial.names, mine))
        numbers = sorted(number for _, number in most.values())
        return None if numbers == sorted(chosen) else self._point([trials[n] for n in numbers])

    def _point(self, trials: Sequence[FormatTrial]) -> FormatPoint | None:
        """Run several formats together."""
        return self.runs.point(_resolved([rule for trial in trials for rule in trial.rules]))


def _rules(plan: Plan, rows: Sequence[Row], column: str, word: str) -> tuple[Mapping[str, str], ...]:
    """Return rules for exactly these parameters, if possible one for each name without its numbers."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        alike.setdefault(re.sub(r"\d+", "*", row.name), []).append(row.name)
    matches = (match for names in alike.values() for match in matches_of(pattern_of(plan, names), names))
    return tuple({"match": match, column: word} for match in matches)


def _resolved(rules: Sequence[Mapping[str, str]]) -> tuple[ResolvedRule, ...]:
    """Read rules as the config reads them."""
    return resolve(load({"precision": {"rules": list(rules)}}), MeshShape()).rules


def _reason_against(columns: Columns, column: results.FormatColumn) -> str:
    """Return why no format is tried for a parameter, or `""`: a rule decides its column, or the column is
    narrow already."""
    reasons = columns.reasons()
    decided = reasons.get("products", reasons[column]) if column == "compute" else reasons[column]
    if columns.pinned or is_by_rule(decided):
        return f"being decided by {decided}"
    if column == "compute":
        return "" if columns.products is None else "because its products are narrow already"
    dtype = columns.gather if column == "gather" else columns.storage.dtype
    return f"because it is {dtype} already" if dtype.format is not None else ""


def _reason(error: ZerodriftError) -> str:
    """Return what an error says must hold, without its place, which is the rule of a trial."""
    for problem in error.problems:
        return problem.must + (f" (here: {problem.got})" if problem.got else "")
    return first_line(error)  # relayed from another rank
