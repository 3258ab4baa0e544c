"""An audit as text and as JSON.

Below WIDTH columns, tables leave out columns of figures and say which.

Invariant: no line is wider than asked for, but a rule of YAML with a name that is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from zerodrift.errors import several
from zerodrift.inspect.audit.advice_rows import (
    bytes_changed,
    format_facts,
    format_table,
    formats_left_out,
    points_to_show,
)
from zerodrift.inspect.audit.results import (
    AuditFinding,
    CellReplay,
    Estimate,
    FormatAdvice,
    GradientLine,
    NarrowerColumn,
    Place,
    Recommendation,
    UpdateCost,
)
from zerodrift.inspect.audit.signals import Drift
from zerodrift.inspect.audit.variants import Choice
from zerodrift.report import (
    elide,
    grid,
    pairs,
    percent,
    render,
    section,
    text_table,
    title,
)

WIDTH = 80
SHOWN = 10  # lines of a table


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
    """Every cell of a forward, the largest estimate first."""
    replayed: tuple[CellReplay, ...]
    """Cells that were run, the largest drift alone first."""
    places: tuple[Place, ...]
    """Operations without a parameter to charge, the largest estimate first."""
    gradients: tuple[GradientLine, ...]
    """Gradients of trained parameters beside the reference's."""
    updates: tuple[UpdateCost, ...]
    """Updates of trained parameters; empty where the plan has no optimizer of its own."""
    flips: Mapping[str, int] = field(default_factory=dict)
    """Router -> choices that differ from the reference's."""
    caused: tuple[tuple[Choice, int], ...] = ()
    """Flips that each replayed cell causes alone."""
    findings: tuple[AuditFinding, ...] = ()
    """Defects that the mode does not explain, the heaviest first."""
    recommendation: Recommendation | None = None
    """Pins and their worth; None where nothing drifts, or none were searched for."""
    narrower: tuple[NarrowerColumn, ...] = ()
    """Columns that may be narrower, and what that would change."""
    formats: FormatAdvice | None = None
    """Narrow formats within a limit on the drift; None where none were asked for."""
    passes: int = 3
    """Passes of the estimates."""
    seconds: float = 0.0
    """Seconds of the estimates."""

    def text(self, *, color: bool = False, width: int = WIDTH) -> str:
        """The whole audit."""
        return audit_text(self, color=color, width=width)

    def to_json(self) -> dict[str, Any]:
        """Every number of the audit."""
        value: dict[str, Any] = _plain(asdict(self))
        if self.recommendation is not None:
            value["recommendation"]["removed"] = self.recommendation.removed
            value["recommendation"]["config"] = config_text(self.recommendation)
        if self.formats is not None:
            value["formats"]["config"] = rules_text(self.formats.rules)
        return value

    def __str__(self) -> str:
        return self.text()


def audit_json(audit: Audit) -> str:
    return json.dumps(audit.to_json(), indent=2) + "\n"


def _plain(value: Any) -> Any:
    """Make JSON values; numbers that are not finite become their names."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def audit_text(audit: Audit, *, color: bool = False, width: int = WIDTH) -> str:
    parts: list[RenderableType] = [title("audit", audit.digest, width), pairs(facts(audit), width=width)]
    parts.append(section("findings", "" if audit.findings else "none"))
    for finding in audit.findings[:SHOWN]:
        where = elide(finding.where, width - 20)
        parts.append(Text().append(finding.kind, style="bold red").append(f"  {where}"))
        parts += [grid([("", f"{finding.what}."), ("", finding.do)], (2,), ("",), width), Text()]
    if len(audit.findings) > SHOWN:
        parts.append(Text(f"and {len(audit.findings) - SHOWN} more", style="dim"))
    widths = {"cell": 7, "operation": 20, "alone": 7, "removes": 7, "loss": 8, "flips": 5}
    for name, detail, rows in cell_tables(audit):
        of_columns = [widths.get(head, _name_width(width)) for head in rows[0]]
        parts += [section(name, detail), text_table(rows, of_columns, (0, 1), _gap(width))]
        parts += [grid(_LEGEND, (8,), ("dim",), width)] if name == "replayed" else []
    if audit.recommendation is not None:
        parts += _pins(audit.recommendation, audit.drift, width)
    if audit.narrower:
        parts += _narrower(audit.narrower, width)
    if audit.formats is not None:
        parts += _formats(audit.formats, width)
    return render([*parts, *_gradients(audit, width)], color, width)


def _gap(width: int) -> str:
    return " " if width < WIDTH else "  "


def _name_width(width: int) -> int:
    """Return the columns of a name, beside the five columns of the widest table of cells."""
    return width - 34 - 5 * len(_gap(width))


def _table(
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    words: Sequence[str],
    wide_only: Sequence[str],
    width: int,
    bold: int | None = None,
) -> list[RenderableType]:
    """Set rows under their head. A width of 0 stands for the rest of the line; columns in `words` are elided.

    The columns in `wide_only` are left out below WIDTH columns, and a line says so.
    """
    left_out = wide_only if width < WIDTH else ()
    kept = [number for number, head in enumerate(rows[0]) if head not in left_out]
    found = [widths[number] for number in kept]
    found[found.index(0)] = width - sum(found) - len(found) + 1
    left = [at for at, number in enumerate(kept) if rows[0][number] in words]
    text = text_table([[row[number] for number in kept] for row in rows], found, left, " ", bold)
    note = Text(f"{WIDTH} columns also show: {', '.join(left_out)}", style="dim")
    return [text, *([note] if left_out else []), Text()]


def facts(audit: Audit) -> list[tuple[str, str]]:
    """The head of the report: the plan, and how far it is from fp32."""
    drift, cosine = audit.drift, audit.gradient_cosine
    ranks, batches = several(audit.ranks, "rank"), several(audit.batches, "micro-batch", "micro-batches")
    rows = [
        ("model", audit.source),
        ("plan", f"mode {audit.mode}, {ranks}, {batches}"),
        ("drift", f"{_spread(drift)}, over {drift.count:,} targets"),
    ]
    figures = (
        f"mean {drift.mean:+.2g}, largest {drift.largest:.2g}, k3 {drift.k3:.2g}, loss {drift.loss:+.2g}"
    )
    rows.append(("", figures))
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
    cells = {each.choice.cell for each in audit.shortlist}
    losses = [each.loss for each in audit.shortlist if each.choice.cell == "compute" or len(cells) == 1]
    losses += [place.loss for place in audit.places]
    moved = f"; together they move the loss by {sum(losses):+.2g}" if losses else ""
    rows.append(("estimates", f"{audit.passes} passes in {audit.seconds:.1f} s{moved}"))
    return rows


def residual_stream(places: Sequence[Place]) -> list[Place]:
    """Find the sums at the end of each block, in order; empty if blocks do not leave narrow sums."""
    streams: dict[tuple[str, int], list[Place]] = {}
    for place in places:
        blocks, _, number = place.module.rpartition(".")
        if place.operation in ("add", "__add__", "add_", "__iadd__") and number.isdecimal():
            streams.setdefault((blocks, int(place.line.rpartition(":")[2])), []).append(place)
    longest = max(streams.items(), key=lambda pair: (len(pair[1]), pair[0]), default=(None, []))[1]
    ordered = sorted(longest, key=lambda place: int(place.module.rpartition(".")[2]))
    return ordered if len(ordered) > 1 else []


def _spread(drift: Drift) -> str:
    return f"rms {drift.rms:.2g} of a log-probability"


def _share(square: float, whole: float) -> str:
    share = square / whole if whole else math.inf
    if not math.isfinite(share):
        return "-"
    return f"{100 * share:.1f}%" if abs(share) >= 0.0005 else "0%"


def _tail(name: str) -> str:
    """The end of a name, which tells most."""
    return ".".join(name.removesuffix(".weight").split(".")[-2:])


def cell_tables(audit: Audit) -> list[tuple[str, str, list[tuple[str, ...]]]]:
    """Name, detail and rows, with a head, of the tables of cells: those that were replayed, those that were
    not, and places without a parameter to charge. The first two columns are words."""
    whole = audit.drift.square
    done = {each.choice for each in audit.replayed}
    replayed: list[tuple[str, ...]] = [("parameter", "cell", "alone", "removes", "loss", "flips")]
    for each in audit.replayed[:SHOWN]:
        alone, flips = each.alone, f"{each.alone.flips:,}" if each.alone.choices else ""
        shares = _share(alone.square, whole), _share(whole - each.widened.square, whole)
        replayed.append((each.choice.pattern, each.choice.cell, *shares, f"{alone.loss:+.1e}", flips))
    estimated: list[tuple[str, ...]] = [("parameter", "cell", "alone", "loss")]
    for one in [e for e in audit.shortlist if e.choice not in done and e.square > 0][:SHOWN]:
        share = _share(one.square, whole)
        estimated.append((one.choice.pattern, one.choice.cell, share, f"{one.loss:+.1e}"))
    places: list[tuple[str, ...]] = [("module and line", "operation", "alone", "loss")]
    for p in audit.places[:SHOWN]:
        where = f"{p.module or 'model'} {p.line}"
        places.append((where, p.operation, _share(p.rms**2, whole), f"{p.loss:+.1e}"))
    tables = [
        ("replayed", "one cell at a time", replayed),
        ("estimated", "not replayed", estimated),
        ("estimated", "operations with no parameter of their own", places),
    ]
    return [each for each in tables if len(each[2]) > 1]


_LEGEND = [
    ("alone", "its part of the squared drift, with everything else in fp32"),
    ("removes", "what is gone of it with this cell in fp32, and everything else as planned"),
    ("loss", "by how much the cell alone moves it"),
]

BYTES = {"rest": "at rest", "peak": "at peak", "wire": "on the wire"}


def _pins(advice: Recommendation, drift: Drift, width: int) -> list[RenderableType]:
    chosen, first = advice.chosen, advice.points[0]
    points = points_to_show(advice)
    rows: list[tuple[str, ...]] = [("", "mode", "left", "flips", "rest", "peak", "wire", "compute", "pins")]
    for point in points:
        names = [pattern for pattern, _, _ in point.pins]
        last = _tail(names[-1].removesuffix(".*").removesuffix(".bias")) if names else "none"
        last = "everything" if names == ["*"] else last
        rows.append((
            ">" if point is chosen else "", point.mode, _share(point.drift.square, drift.square),
            f"{point.drift.flips:,}" if point.drift.choices else "", *bytes_changed(point.bytes, first.bytes),
            last if len(names) < 2 else f"{len(names) - 1} + {last}",
        ))  # fmt: skip
    bold = next((number for number, point in enumerate(points, 1) if point is chosen), None)
    table = _table(
        rows,
        (1, 13, 6, 5, 6, 6, 6, 7, 0),
        ("", "mode", "pins"),
        ("flips", "peak", "compute"),
        width,
        bold,
    )
    parts: list[RenderableType] = [section("pins", "each line was run"), *table]
    if not chosen.pins and chosen.mode == first.mode:
        return [*parts, Text("No pin removes a part worth a rule for that many bytes.")]
    removed = percent(min(1.0, max(0.0, advice.removed)))
    told = (
        f"{removed} of the squared drift that fp32 everywhere removes, for at most {advice.budget:.1%} more "
        f"bytes {BYTES[advice.of]}:"
    )
    return [*parts, grid([("", told)], (0,), ("",), width), Text(), _copied(config_text(advice, width))]


def _copied(config: str) -> RenderableType:
    """YAML whose lines are never wrapped: people copy it."""
    return Group(Text(config, style="green", no_wrap=True, overflow="ignore"))


def config_text(advice: Recommendation, width: int = WIDTH) -> str:
    """The recommendation as YAML for the config."""
    return rules_text(advice.rules, f"  mode: {advice.chosen.mode}", width=width)


def rules_text(rules: Sequence[Mapping[str, str]], *lines: str, width: int = WIDTH) -> str:
    """Rules as YAML for the config, below other lines of `precision`. A rule that is wide takes several."""
    found = ["precision:", *lines, *(["  rules:"] if rules else [])]
    for rule in rules:
        quoted = {**rule, "match": json.dumps(rule["match"], ensure_ascii=False)}
        cells = [f"{key}: {value}" for key, value in quoted.items()]
        line = f"    - {{{', '.join(cells)}}}"
        is_wide = len(line) > width
        found += [f"    - {cells[0]}", *(f"      {cell}" for cell in cells[1:])] if is_wide else [line]
    return "\n".join(found)


def _narrower(found: Sequence[NarrowerColumn], width: int) -> list[RenderableType]:
    rows: list[tuple[str, ...]] = [("column", "median", "worst", "", "rest", "peak", "wire")]
    for one in found:
        changes = bytes_changed(one.after, one.before)[:3]
        name = f"{one.column} {one.value}"
        rows.append((name, percent(one.middle), percent(one.most), _tail(one.worst), *changes))
        if one.many:
            moved = several(one.many, "gradient" if one.column == "reduce" else "update")
            by = f"{one.many} above 5%" if width < WIDTH else f"{moved} by more than 5%"
            rows.append(("", "", "", by, "", "", ""))
    table = _table(rows, (12, 7, 7, 0, 7, 7, 7), ("column", ""), ("median", "peak"), width)
    return [section("narrower", "what it changes of a gradient's or an update's norm"), *table]


def _end(name: str, width: int) -> str:
    """The last components of a name that fit."""
    parts = name.removesuffix(".weight").split(".")
    while len(parts) > 1 and len(".".join(parts)) > width:
        del parts[0]
    return ".".join(parts)


def _formats(advice: FormatAdvice, width: int) -> list[RenderableType]:
    name, rows = f"for {advice.goal.of}", format_table(advice)
    parts: list[RenderableType] = [section("narrow formats", f"{name}; each line was run")]
    if len(rows) > 1:
        shown = rows[: 1 + max(SHOWN, len(advice.taken))]
        room = width - 55 if width >= WIDTH else width - 39
        cells = [(row[0], _end(row[1], room), f"{row[2]} {row[3]}", *row[4:]) for row in shown]
        cells[0] = ("", "parameters", "format", *rows[0][4:])
        words = ("", "parameters", "format")
        parts += _table(cells, (1, 0, 12, 8, 6, 6, 7, 8), words, ("elements", "wire"), width)
        if len(rows) > len(shown):
            parts += [Text(f"and {len(rows) - len(shown)} more", style="dim"), Text()]
    told = [
        *format_facts(advice),
        *(f"Not run, {reason}: {names}." for reason, names in formats_left_out(advice)),
    ]
    parts.append(grid([("", line) for line in told], (0,), ("",), width))
    rules = rules_text(advice.rules, width=width)
    return [*parts, *([Text(), _copied(rules)] if advice.rules else [])]


def _gradients(audit: Audit, width: int) -> list[RenderableType]:
    def figure(value: float) -> str:
        return f"{value:.2g}" if value else "-"

    name = _name_width(width)
    worst = sorted(audit.gradients, key=lambda line: -line.relative)[:5]
    rows = [("parameter", "from fp32", "accumulate", "reduce")]
    rows += [(g.name, f"{g.relative:.2g}", figure(g.accumulate), figure(g.reduce)) for g in worst]
    parts: list[RenderableType] = [
        section("gradients", "norm of the difference over the norm"),
        text_table(rows, (name, 10, 10, 8), gap=_gap(width)),
    ]
    lost = sorted(audit.updates, key=lambda cost: -(cost.lost + cost.stuck))[:5]
    if lost and lost[0].lost + lost[0].stuck > 0:
        rows = [("parameter", "lost", "stuck", "underflow")]
        rows += [(u.name, percent(u.lost), percent(u.stuck), percent(u.underflow)) for u in lost]
        table = text_table(rows, (name, 8, 8, 10), gap=_gap(width))
        parts += [section("updates", "shares of elements"), table]
    return parts
