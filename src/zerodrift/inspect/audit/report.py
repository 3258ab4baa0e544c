"""An audit as text and as one HTML page, from one list of sections.

Below 80 columns, tables of the text leave out some columns of figures and say which. The page also has a map
of where drift begins.

Invariant: no line is wider than asked for, except a rule of YAML with a long name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zerodrift import report
from zerodrift.errors import listed, several
from zerodrift.inspect.audit.results import (
    AuditFinding,
    Bytes,
    CellReplay,
    Estimate,
    FormatAdvice,
    FormatPoint,
    GradientLine,
    NarrowerColumn,
    Place,
    Recommendation,
    UpdateCost,
    rules_text,
)
from zerodrift.inspect.audit.runs import Drift
from zerodrift.inspect.audit.variants import Choice
from zerodrift.report import PageCell, PageSection, PageTable, Paragraph, Preformatted, percent

SHOWN, MOST = 10, 1 << 20  # lines of a table; findings and formats of a page

_LEGEND = [
    ("alone", "part of the squared drift with everything else in fp32"),
    ("removes", "part that is gone with this cell in fp32 and everything else as planned"),
    ("loss", "change of the loss by the cell alone"),
]

_BYTES = {"rest": "at rest", "peak": "at peak", "wire": "on the wire"}

_COLUMNS = ("storage", "compute", "accumulate", "reduce", "gradient", "lost")
"""Columns of the map: two of the forward, then of the gradient, then the update."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Results of an audit."""

    source: str
    """The model's name."""
    digest: str
    """The plan's digest."""
    mode: str
    """The plan's mode."""
    ranks: int
    """Ranks that ran the audit."""
    batches: int
    """Micro-batches of each rank."""
    drift: Drift
    """Drift of the plan from the reference."""
    own: Drift
    """Drift that the model's own casts cause in the reference."""
    gradient_cosine: float
    """Cosine of all gradients together with the reference's."""
    shortlist: tuple[Estimate, ...]
    """Cells of the forward, the largest estimate first."""
    replayed: tuple[CellReplay, ...]
    """Replayed cells, the largest drift alone first."""
    places: tuple[Place, ...]
    """Rounding operations that involve no parameter, the largest estimate first."""
    gradients: tuple[GradientLine, ...]
    """Gradients of trained parameters beside the reference's."""
    updates: tuple[UpdateCost, ...]
    """Updates of trained parameters. Empty if the plan has no optimizer."""
    flips: Mapping[str, int] = field(default_factory=dict)
    """Router -> choices that differ from the reference's."""
    caused: tuple[tuple[Choice, int], ...] = ()
    """Flips that each replayed cell causes alone."""
    findings: tuple[AuditFinding, ...] = ()
    """Defects that the mode does not explain, the heaviest first."""
    recommendation: Recommendation | None = None
    """Pins and their worth. None if nothing drifts or no pins were searched for."""
    narrower: tuple[NarrowerColumn, ...] = ()
    """Columns that may be narrower, and the change that this makes."""
    formats: FormatAdvice | None = None
    """Narrow formats within a limit on the drift. None if none were searched for."""
    passes: int = 3
    """Passes of the estimates."""
    seconds: float = 0.0
    """Seconds of the estimates."""

    def text(self, *, color: bool = False, width: int = 80) -> str:
        """Render the audit."""
        head = [report.title("audit", self.digest, width), report.pairs(_facts(self), width=width)]
        sections = [_findings(self, SHOWN), *_sections(self, width, SHOWN), *_gradients(self)]
        return report.render([*head, *report.sections_text(sections, width)], color, width)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers of the audit as JSON values. Those that are not finite become texts."""
        value: dict[str, Any] = report.as_json.json_value(asdict(self), str)
        if self.recommendation is not None:
            value["recommendation"]["removed"] = self.recommendation.removed
            value["recommendation"]["config"] = self.recommendation.config()
        if self.formats is not None:
            value["formats"]["config"] = rules_text(self.formats.rules)
        return value

    def __str__(self) -> str:
        return self.text()


def audit_page(audit: Audit) -> str:
    sections = [_findings(audit, MOST), PageSection("where drift begins", "map", _map(audit))]
    for each in _sections(audit, 80, MOST):
        anchor, title = f"{each.title}-{len(sections)}".replace(" ", "-"), f"{each.title}: {each.detail}"
        sections.append(replace(each, title=title, id=anchor))
    sections = [replace(each, title=each.title.capitalize()) for each in sections]
    top = report.PageHead("zerodrift audit", facts=_facts(audit))
    return report.page(f"zerodrift audit: {audit.source}", top, sections)


def _facts(audit: Audit) -> list[tuple[str, str]]:
    """Describe the plan and its drift from fp32 in the head of the report."""
    drift, cosine = audit.drift, audit.gradient_cosine
    ranks, batches = several(audit.ranks, "rank"), several(audit.batches, "micro-batch", "micro-batches")
    more = f"mean {drift.mean:+.2g}, largest {drift.largest:.2g}, k3 {drift.k3:.2g}, loss {drift.loss:+.2g}"
    rows = [
        ("model", audit.source),
        ("plan", f"mode {audit.mode}, {ranks}, {batches}"),
        ("drift", f"{_spread(drift)}, over {drift.count:,} targets"),
        ("", more),
    ]
    if drift.choices:
        share = percent(drift.flips / drift.choices)
        rows.append(("routing", f"{drift.flips:,} of {drift.choices:,} choices are other ({share})"))
    if audit.own.rms:
        rows.append(("own casts", f"the model's code by itself: {_spread(audit.own)}"))
    if stream := residual_stream(audit.places):
        first, last = stream[0], stream[-1]
        grows = f"rms {first.size:.2g} after {first.module}, {last.size:.2g} after {last.module}"
        rows.append(("residual", f"{grows}; rounded by {last.relative:.2g} of it"))
    beside = "none: they are not finite"
    if math.isfinite(cosine):
        beside = f"1 - {1 - cosine:.2g}" if cosine < 1 else "1"
    rows.append(("gradients", f"cosine with those in fp32: {beside}"))
    if not audit.updates:
        rows.append(("updates", "not measured: the plan has no optimizer, or each of its steps is skipped"))
    cells = {each.choice.cell for each in audit.shortlist}
    losses = [each.loss for each in audit.shortlist if each.choice.cell == "compute" or len(cells) == 1]
    losses += [place.loss for place in audit.places]
    moved = f"; together they move the loss by {sum(losses):+.2g}" if losses else ""
    rows.append(("estimates", f"{audit.passes} passes in {audit.seconds:.1f} s{moved}"))
    return rows


def _spread(drift: Drift) -> str:
    return f"rms {drift.rms:.2g} of a log-probability"


def residual_stream(places: Sequence[Place]) -> list[Place]:
    """Find the residual sums at the end of each block, in order. Empty if no blocks round such sums."""
    streams: dict[tuple[str, int], list[Place]] = {}
    for place in places:
        blocks, _, number = place.module.rpartition(".")
        if place.operation in ("add", "__add__", "add_", "__iadd__") and number.isdecimal():
            streams.setdefault((blocks, int(place.line.rpartition(":")[2])), []).append(place)
    longest = max(streams.items(), key=lambda pair: (len(pair[1]), pair[0]), default=(None, []))[1]
    ordered = sorted(longest, key=lambda place: int(place.module.rpartition(".")[2]))
    return ordered if len(ordered) > 1 else []


def _findings(audit: Audit, most: int) -> PageSection:
    rows = [(each.kind, each.where, f"{each.what}.", each.do) for each in audit.findings[:most]]
    left = len(audit.findings) - most
    more = [Paragraph(f"and {left} more")] if left > 0 else []
    found = report.FactList(rows, "findings") if rows else Paragraph("None.", "")
    return PageSection("findings", "findings", [found, *more])


def _sections(audit: Audit, width: int, most: int) -> list[PageSection]:
    """Make the sections about cells, places, pins, narrower columns and narrow formats."""
    whole = audit.drift.square
    done = {each.choice for each in audit.replayed}

    def row(name: str, cell: str, *figures: str) -> tuple[str | PageCell, ...]:
        return (PageCell(name, "name"), PageCell(cell, "cell"), *figures)

    replayed, estimated = [], []
    for each in audit.replayed[:SHOWN]:
        alone, flips = each.alone, f"{each.alone.flips:,}" if each.alone.choices else ""
        removed = whole - each.widened.square if each.widened is not None else math.nan
        shares = _share(alone.square, whole), _share(removed, whole)
        replayed.append(row(each.choice.pattern, each.choice.cell, *shares, f"{alone.loss:+.1e}", flips))
    for one in [one for one in audit.shortlist if one.choice not in done and one.square > 0][:SHOWN]:
        figures = _share(one.square, whole), f"{one.loss:+.1e}"
        estimated.append(row(one.choice.pattern, one.choice.cell, *figures))
    places = [
        row(f"{p.module or 'model'} {p.line}", p.operation, _share(p.rms**2, whole), f"{p.loss:+.1e}")
        for p in audit.places[:SHOWN]
    ]
    heads: tuple[str, ...] = ("parameter", "cell", "alone", "removes", "loss", "flips")
    where, words = "operations with no parameter of their own", ("module and line", "operation")
    legend = report.FactList(_LEGEND) if replayed else Paragraph("")
    found = [
        _section("replayed", "one cell at a time", heads, replayed, ("parameter", "cell"), (), legend),
        _section("estimated", "not replayed", (*heads[:3], "loss"), estimated, ("parameter", "cell")),
        _section("estimated", where, (*words, "alone", "loss"), places, words),
    ]
    if audit.recommendation is not None:
        found.append(_pins(audit.recommendation, audit.drift, width))
    narrower: list[tuple[str, ...]] = []
    for column in audit.narrower:
        changes = percent(column.middle), percent(column.most), str(column.many)
        bytes_ = _changes(column.after, column.before)[:3]
        narrower.append((f"{column.column} {column.value}", column.worst, *changes, *bytes_))
    heads = "column", "worst", "median", "most", "above 5%", "rest", "peak", "wire"
    what, wide = "what it changes of a gradient's or an update's norm", ("median", "above 5%", "peak")
    found.append(_section("narrower", what, heads, narrower, heads[:2], wide))
    if audit.formats is not None:
        found.append(_formats(audit.formats, width, most))
    return [each for each in found if each.blocks]


def _section(
    name: str,
    detail: str,
    heads: tuple[str, ...],
    rows: Sequence[Sequence[str | PageCell]],
    words: Sequence[str],
    wide_only: Sequence[str] = (),
    *more: Any,
) -> PageSection:
    """Return a section with a table, or without blocks if there are no rows. `words` are heads of columns of
    text; all others are figures."""
    figures = [head for head in heads if head not in words]
    table = PageTable(heads, rows, "rows", figures, wide_only=wide_only)
    return PageSection(name, "", [table, *more] if rows else (), detail)


def _share(square: float, whole: float) -> str:
    share = square / whole if whole else math.inf
    if not math.isfinite(share):
        return "-"
    return f"{100 * share:.1f}%" if abs(share) >= 0.0005 else "0%"


def _changes(now: Bytes, before: Bytes) -> list[str]:
    """Format the changes of bytes at rest, at the peak, on the wire and of compute."""
    found = []
    for mine, theirs in zip(asdict(now).values(), asdict(before).values(), strict=True):
        change = f"{100 * (mine / theirs - 1):+.1f}%" if theirs else "new"
        found.append("=" if mine == theirs else change)
    return found


def _pins(advice: Recommendation, drift: Drift, width: int) -> PageSection:
    """Show the first point of each mode, the points that remove more drift, the recommended point, and
    everything pinned."""
    chosen, first = advice.chosen, advice.points[0]
    shown = [first]
    for point in advice.points[1:-1]:
        less = point.drift.square < shown[-1].drift.square - 0.01 * first.drift.square
        if point is chosen or point.mode != shown[-1].mode or less:
            shown.append(point)
    rows = []
    for point in [*shown, *advice.points[1:][-1:]]:
        names = [pattern for pattern, _, _ in point.pins]
        last = "everything" if names == ["*"] else names[-1] if names else "none"
        pins = PageCell(last if len(names) < 2 else f"{len(names) - 1} + {last}", "name", " ".join(names))
        flips = f"{point.drift.flips:,}" if point.drift.choices else ""
        share, changes = _share(point.drift.square, drift.square), _changes(point.bytes, first.bytes)
        rows.append((">" if point is chosen else "", point.mode, share, flips, *changes, pins))
    told = (
        f"{percent(min(1.0, max(0.0, advice.removed)))} of the squared drift that fp32 everywhere removes, "
        f"for at most {advice.budget:.1%} more bytes {_BYTES[advice.of]}:"
    )
    more: list[Any] = [Paragraph(told, ""), Preformatted(advice.config(width))]
    if not chosen.pins and chosen.mode == first.mode:
        more = [Paragraph("No pin removes a part worth a rule for that many bytes.", "")]
    heads = "", "mode", "left", "flips", "rest", "peak", "wire", "compute", "pins"
    wide = "flips", "peak", "compute"
    return _section("pins", "each line was run", heads, rows, ("", "mode", "pins"), wide, *more)


def _formats(advice: FormatAdvice, width: int, most: int) -> PageSection:
    """Show the chosen formats in the order in which they were added, then other trials by their drift."""
    rows: list[tuple[str | PageCell, ...]] = []
    order = {number: place for place, number in enumerate(advice.taken)}
    ran = [(n, trial, trial.alone) for n, trial in enumerate(advice.trials) if trial.alone is not None]
    for number, trial, alone in sorted(ran, key=lambda one: (order.get(one[0], len(ran)), one[2].drift.rms)):
        rest, _, wire, _ = _changes(alone.bytes, advice.start.bytes)
        together = "" if trial.together is None else f"{trial.together.drift.rms:.2g}"
        mark, count = ">" if number in order else "", report.elements(trial.numel)
        name = PageCell(trial.pattern.removesuffix(".weight"), "name")
        word = PageCell(f"{trial.column} {trial.format}", "cell")
        rows.append((mark, name, word, count, rest, wire, f"{alone.drift.rms:.2g}", together))
    shown = max(most, len(advice.taken))
    more = [Paragraph(f"and {len(rows) - shown} more")] if len(rows) > shown else []
    told = [*more, *(Paragraph(line, "") for line in _format_facts(advice))]
    rules = [Preformatted(rules_text(advice.rules, width=width))] if advice.rules else []
    heads = "", "parameters", "format", "elements", "rest", "wire", "alone", "together"
    detail = f"for {advice.goal.of}; each line was run"
    made = _section(
        "narrow formats", detail, heads, rows[:shown], heads[:3], ("elements", "wire"), *told, *rules
    )
    return made if rows else replace(made, blocks=[*told, *rules])


def _format_facts(advice: FormatAdvice) -> list[str]:
    """Describe the limit, the chosen formats together, every format together, and trials that were not
    run."""
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
        every = _with_bytes(advice.everything, start)
        told.append(f"Every group in the format that saves most, run: rms {every}.")
    reasons: dict[str, dict[str, None]] = {}
    for trial in advice.trials:
        if trial.left_out:
            reasons.setdefault(trial.left_out, {})[f"{trial.pattern} {trial.column}"] = None
    return [*told, *(f"Not run, {reason}: {listed(names)}." for reason, names in reasons.items())]


def _with_bytes(point: FormatPoint, start: FormatPoint) -> str:
    """Describe the drift, flips and changes of bytes of a point in a clause."""
    found = [f"{point.drift.rms:.2g}"]
    if point.drift.choices:
        found.append(f"{point.drift.flips:,} other routing choices ({start.drift.flips:,} as planned)")
    for now, before, where in (
        (point.bytes.rest, start.bytes.rest, "at rest"),
        (point.bytes.wire, start.bytes.wire, "on the wire of a step"),
    ):
        if now != before:
            share = f" ({percent(abs(before - now) / before)})" if before else ""
            less = f"{'less' if now < before else 'more'} {where}"
            found.append(f"{report.size(abs(before - now))}{share} {less}")
    return listed(found)


def _gradients(audit: Audit) -> list[PageSection]:
    def figure(value: float) -> str:
        return f"{value:.2g}" if value else "-"

    worst = sorted(audit.gradients, key=lambda line: -line.relative)[:5]
    rows = [(g.name, f"{g.relative:.2g}", figure(g.accumulate), figure(g.reduce)) for g in worst]
    heads, what = ("parameter", "from fp32", "accumulate", "reduce"), "norm of the difference over the norm"
    found = [_section("gradients", what, heads, rows, heads[:1])]
    lost = sorted(audit.updates, key=lambda cost: -(cost.lost + cost.stuck))[:5]
    if lost and lost[0].lost + lost[0].stuck > 0:
        rows = [(u.name, percent(u.lost), percent(u.stuck), percent(u.underflow)) for u in lost]
        heads = "parameter", "lost", "stuck", "underflow"
        found.append(_section("updates", "shares of elements", heads, rows, heads[:1]))
    return found


def _map(audit: Audit) -> list[Any]:
    """Draw a table of layers by columns, with shares of the squared drift, of norms or of elements."""
    layers: dict[str, dict[str, float]] = {}
    whole = audit.drift.square or 1.0

    def add(name: str, cells: Mapping[str, float], sums: bool = False) -> None:
        numbered = re.match(r"(.*?\.\d+)\.", name)
        row = layers.setdefault(numbered.group(1) if numbered else name.rpartition(".")[0] or name, {})
        for cell, value in cells.items():
            row[cell] = row.get(cell, 0.0) + value if sums else max(row.get(cell, 0.0), value)

    for estimate in audit.shortlist:
        add(estimate.choice.names[0], {estimate.choice.cell: estimate.square / whole}, sums=True)
    for line in audit.gradients:
        cells = {"gradient": line.relative, "accumulate": line.accumulate, "reduce": line.reduce}
        add(line.name, cells)
    for cost in audit.updates:
        add(cost.name, {"lost": cost.lost})
    shown = [cell for cell in _COLUMNS if any(row.get(cell, 0.0) for row in layers.values())]
    if not shown:
        return [Paragraph("Nowhere: nothing is narrower than fp32.", "")]

    def heat(value: float) -> PageCell:
        """Return a cell with a background by the logarithm of a share, from a thousandth to all."""
        strength = max(0.0, min(1.0, 1 + math.log10(value) / 3)) if value > 0 else 0.0
        return PageCell(percent(value) if value >= 5e-5 else "", heat=strength)

    rows = [
        (PageCell(name, is_head=True), *(heat(row.get(cell, 0.0)) for cell in shown))
        for name, row in layers.items()
    ]
    words = (
        "storage and compute: estimated parts of the squared drift. gradient: distance from the gradient in "
        "fp32 over its norm, accumulate and reduce what these columns alone do to it; lost: elements whose "
        "update is remembered nowhere. The worst parameter of a layer stands for it."
    )
    return [PageTable(("", *shown), rows, "map", figures=()), Paragraph(words)]
