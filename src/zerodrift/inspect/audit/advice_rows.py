"""Rows and sentences of what an audit advises, which its text and its page share.

Invariant: pure; every figure is one of the advice, or the difference of two of them.
"""

from __future__ import annotations

from dataclasses import asdict

from zerodrift.errors import listed
from zerodrift.inspect.audit.results import Bytes, FormatAdvice, FormatPoint, Point, Recommendation
from zerodrift.report import elements, percent, size


def points_to_show(advice: Recommendation) -> list[Point]:
    """The first point of each mode, those that remove a part, the recommended one, and everything pinned."""
    first, shown = advice.points[0], [advice.points[0]]
    for point in advice.points[1:-1]:
        less = point.drift.square < shown[-1].drift.square - 0.01 * first.drift.square
        if point is advice.chosen or point.mode != shown[-1].mode or less:
            shown.append(point)
    return [*shown, *advice.points[1:][-1:]]


def bytes_changed(now: Bytes, before: Bytes) -> list[str]:
    """Changes at rest, at the peak, on the wire and of compute."""
    found = []
    for mine, theirs in zip(asdict(now).values(), asdict(before).values(), strict=True):
        change = f"{100 * (mine / theirs - 1):+.1f}%" if theirs else "new"
        found.append("=" if mine == theirs else change)
    return found


def format_table(advice: FormatAdvice) -> list[tuple[str, ...]]:
    """Rows with a head: chosen formats in the order in which they were added, then those that were run, by
    their drift alone. The first four columns are words."""
    rows: list[tuple[str, ...]] = [
        ("", "parameters", "column", "format", "elements", "rest", "wire", "alone", "together")
    ]
    others = [n for n, trial in enumerate(advice.trials) if trial.alone and n not in advice.taken]
    others.sort(key=lambda n: -1.0 if (point := advice.trials[n].alone) is None else point.drift.rms)
    for number in (*advice.taken, *others):
        trial = advice.trials[number]
        if trial.alone is not None:
            rest, _, wire, _ = bytes_changed(trial.alone.bytes, advice.start.bytes)
            together = "" if trial.together is None else f"{trial.together.drift.rms:.2g}"
            mark, count = ">" if number in advice.taken else "", elements(trial.numel)
            where = trial.pattern, trial.column, trial.format
            rows.append((mark, *where, count, rest, wire, f"{trial.alone.drift.rms:.2g}", together))
    return rows


def format_facts(advice: FormatAdvice) -> list[str]:
    """Sentences about the chosen formats: the limit, all of them together, and the other end of the scale."""
    goal, start, chosen = advice.goal, advice.start, advice.chosen
    times = f", {goal.limit:g} times the plan's {start.drift.rms:.2g}" if goal.is_multiple else ""
    limit = f"The limit is a drift of rms {advice.limit:.2g}{times}."
    if advice.limit == 0:
        limit += " Give it as a number where the plan does not drift: `--narrow bytes:0.01`."
    told = [limit]
    if advice.taken:
        told.append(f"The marked formats together, run: rms {_with_bytes(chosen, start)}.")
    elif advice.everything is not None:
        told.append("No format stays within it.")
    if advice.everything is not None:
        told.append(
            f"Every group in the format that saves most, run: rms {_with_bytes(advice.everything, start)}."
        )
    return told


def _with_bytes(point: FormatPoint, start: FormatPoint) -> str:
    """A point's drift, flips and changes of bytes in a clause."""
    found = [f"{point.drift.rms:.2g}"]
    if point.drift.choices:
        found.append(f"{point.drift.flips:,} other routing choices ({start.drift.flips:,} as planned)")
    for now, before, where in (
        (point.bytes.rest, start.bytes.rest, "at rest"),
        (point.bytes.wire, start.bytes.wire, "on the wire of a step"),
    ):
        if now != before:
            share = f" ({percent(abs(before - now) / before)})" if before else ""
            found.append(f"{size(abs(before - now))}{share} {'less' if now < before else 'more'} {where}")
    return listed(found)


def formats_left_out(advice: FormatAdvice) -> list[tuple[str, str]]:
    """(reason, what was left out for it) of trials that were not run."""
    reasons: dict[str, dict[str, None]] = {}
    for trial in advice.trials:
        if trial.left_out:
            reasons.setdefault(trial.left_out, {})[f"{trial.pattern} {trial.column}"] = None
    return [(reason, listed(names)) for reason, names in reasons.items()]
