"""Choose a narrow format for every group of matrices, within a limit on the drift from fp32.

Modules whose paths differ in numbers alone are one group. Each group is run alone in each format, with
everything else as planned. Then groups are added, those first that save most for the squared drift that they
add, and each addition is run. A trial is the rule that a person pastes, read as the config reads it.

Invariant: every drift is a run of the plan with the rules that are printed; nothing is chosen by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zerodrift.config import load
from zerodrift.errors import ConfigError, ZerodriftError, first_line
from zerodrift.inspect.audit.advice import Progress, bytes_of, matches_of, pattern_of
from zerodrift.inspect.audit.estimates import AuditSetup
from zerodrift.inspect.audit.results import FormatAdvice, FormatColumn, FormatGoal, FormatPoint, FormatTrial
from zerodrift.inspect.audit.run import REFUSED
from zerodrift.inspect.audit.signals import Drift, Signals, drift
from zerodrift.inspect.audit.variants import with_rules
from zerodrift.mesh import MeshShape
from zerodrift.model import ModelSpec, describe
from zerodrift.plan import Plan, Row, build
from zerodrift.policy import Columns, Policy, ResolvedRule, is_by_rule, resolve

FORMATS: Mapping[FormatColumn, tuple[str, ...]] = {
    "gather": ("int8", "fp8", "mxfp8"),
    "storage": ("nf4", "int8", "fp8"),
    "compute": ("fp8",),
}
"""Column -> words of the formats that are tried in it."""

TIMES = 1.5  # multiple of the plan's own drift that is the limit by default


def parse_goal(text: str, where: str = "narrow") -> FormatGoal:
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
    return FormatGoal("bytes" if word == "bytes" else "speed", value, times or not limit)


@dataclass(frozen=True, slots=True)
class FormatSearch:
    """A search for narrow formats, from the plan as it was run."""

    setup: AuditSetup
    plan: Plan
    whole: Policy  # the policy with its optimizer, for the bytes
    reference: Signals
    planned: Drift
    goal: FormatGoal
    progress: Progress

    def recommend(self) -> FormatAdvice:
        """Run every group in every format, then add groups until the limit."""
        spec = describe(self.setup.subject.make())
        start = FormatPoint(self.planned, bytes_of(build(self.whole, spec, self.setup.mesh)))
        goal = self.goal
        limit = goal.limit * self.planned.rms if goal.is_multiple else goal.limit
        trials = self._asked()
        for number, trial in enumerate(trials):
            self.progress("narrow formats, alone", number, len(trials))
            trials[number] = self._alone(trial, spec, start)
        chosen = self._add(trials, spec, start, limit)
        most = self._everything(trials, chosen, spec)
        rules = tuple(rule for number in chosen for rule in trials[number].rules)
        last = trials[chosen[-1]].together if chosen else start
        return FormatAdvice(goal, limit, start, tuple(trials), tuple(chosen), last or start, most, rules)

    def _asked(self) -> list[FormatTrial]:
        """Return a trial of every group of matrices in every format, none of them run."""
        groups: dict[tuple[str, FormatColumn, str], list[Row]] = {}
        for row in self.plan.rows:
            if row.columns.compute.is_floating and len(row.shape) > 1:
                path = re.sub(r"\d+", "*", row.name.rpartition(".")[0])
                column: FormatColumn = "gather" if row.trained else "storage"
                column = "compute" if self.goal.of == "speed" else column
                groups.setdefault((path, column, _reason_against(row.columns, column)), []).append(row)
        trials = []
        for (_, column, reason), rows in groups.items():
            names = tuple(row.name for row in rows)
            numel = sum(row.whole_numel for row in rows)
            for word in FORMATS[column][: 1 if reason else None]:
                rules = _rules(self.plan, rows, column, word)
                pattern = rules[0]["match"] if len(rules) == 1 else pattern_of(self.plan, names)
                trials.append(FormatTrial(pattern, names, column, word, numel, rules, left_out=reason))
        return trials

    def _alone(self, trial: FormatTrial, spec: ModelSpec, start: FormatPoint) -> FormatTrial:
        """Run a trial with everything else as planned, unless it saves nothing or is not admitted."""
        if trial.left_out:
            return trial
        try:
            plan = self._planned(trial.rules, spec)
            if reason := self._useless(trial.column, start, plan):
                return replace(trial, left_out=reason)
            return replace(trial, alone=FormatPoint(self._drift(trial.rules), bytes_of(plan)))
        except REFUSED as error:
            return replace(trial, left_out=f"refused by the plan ({_reason(error)})")

    def _useless(self, column: FormatColumn, start: FormatPoint, plan: Plan) -> str:
        """Return why a format saves no bytes; `""` if it does, or is for speed."""
        if self.goal.of == "speed":
            return ""
        before, after = start.bytes, bytes_of(plan)
        if column == "gather" and after.wire >= before.wire:
            alone = self.setup.mesh.world == 1
            where = "nothing travels on one rank, as it does under torchrun"
            return f"because {where if alone else 'it saves no bytes on the wire'}"
        saves = after.sum < before.sum
        return "" if saves else "because it takes more bytes at rest than it saves on the wire"

    def _add(self, trials: list[FormatTrial], spec: ModelSpec, start: FormatPoint, limit: float) -> list[int]:
        """Add formats while the drift stays within the limit; return those that stay, in their order.

        A format may replace another one of its group that saves less.
        """
        chosen: list[int] = []
        left = {n for n, one in enumerate(trials) if one.alone is not None and one.alone.drift.rms <= limit}
        count = len(left)

        def worth(number: int) -> tuple[float, float]:
            """Saved bytes, or elements in a narrow product, for each squared drift; and how many."""
            before = next((n for n in chosen if trials[n].names == trials[number].names), None)
            old = start if before is None else trials[before].alone
            new = trials[number].alone
            assert new is not None and old is not None, "a trial that was chosen was run"
            saved = old.bytes.sum - new.bytes.sum
            if self.goal.of == "speed":
                saved = trials[number].numel if before is None else 0
            added = new.drift.square - max(old.drift.square, self.planned.square)
            return (saved / added if added > 0 else math.inf, saved)

        while left:
            self.progress("narrow formats, together", count - len(left), count)
            left = {number for number in left if worth(number)[1] > 0}
            if not left:
                break
            number = max(left, key=lambda n: (worth(n), -n))
            left.remove(number)
            added = [n for n in chosen if trials[n].names != trials[number].names] + [number]
            point = self._point([trials[n] for n in added], spec)
            trials[number] = replace(trials[number], together=point)
            if point is not None and point.drift.rms <= limit:
                chosen = added
        return chosen

    def _everything(
        self, trials: Sequence[FormatTrial], chosen: Sequence[int], spec: ModelSpec
    ) -> FormatPoint | None:
        """Run every group in the format that saves most, unless that is what was chosen."""
        most: dict[tuple[str, ...], tuple[int, int]] = {}  # names of a group -> bytes, and which trial
        for number, trial in enumerate(trials):
            if trial.alone is not None:
                mine = trial.alone.bytes.sum, number
                most[trial.names] = min(mine, most.get(trial.names, mine))
        numbers = sorted(number for _, number in most.values())
        return None if numbers == sorted(chosen) else self._point([trials[n] for n in numbers], spec)

    def _point(self, trials: Sequence[FormatTrial], spec: ModelSpec) -> FormatPoint | None:
        """Run several formats together; None if the plan or the model does not admit that."""
        rules = [rule for trial in trials for rule in trial.rules]
        try:
            return FormatPoint(self._drift(rules), bytes_of(self._planned(rules, spec)))
        except REFUSED:
            return None

    def _planned(self, rules: Sequence[Mapping[str, str]], spec: ModelSpec) -> Plan:
        return build(with_rules(self.whole, _resolved(rules)), spec, self.setup.mesh)

    def _drift(self, rules: Sequence[Mapping[str, str]]) -> Drift:
        return drift(self.setup.signals(with_rules(self.plan.policy, _resolved(rules))), self.reference)


def _rules(plan: Plan, rows: Sequence[Row], column: str, word: str) -> tuple[Mapping[str, str], ...]:
    """Return rules that match exactly these parameters, one for each name without its numbers where it can
    be."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        alike.setdefault(re.sub(r"\d+", "*", row.name), []).append(row.name)
    matches = (match for names in alike.values() for match in matches_of(pattern_of(plan, names), names))
    return tuple({"match": match, column: word} for match in matches)


def _resolved(rules: Sequence[Mapping[str, str]]) -> tuple[ResolvedRule, ...]:
    """Read rules as the config reads them."""
    return resolve(load({"precision": {"rules": list(rules)}}), MeshShape()).rules


def _reason_against(columns: Columns, column: FormatColumn) -> str:
    """Return why a parameter is not tried: a rule has decided, or it is narrow; `""` if it is tried."""
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
