"""An audit as text: what rounding costs, where, what to pin, and what is not as it should be.

Right at 80 columns, whatever the terminal, so that it can be pasted into an issue.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from zerodrift.numerics.nouns import (
    AuditFinding,
    Estimate,
    GradientLine,
    Narrower,
    Place,
    Point,
    Recommendation,
    Replayed,
    UpdateCost,
)
from zerodrift.numerics.signals import Drift
from zerodrift.numerics.variants import Choice
from zerodrift.report import figures
from zerodrift.report.frame import elide, grid, pairs, printed, section, title

WIDTH = 80
SHOWN = 10
"""Lines of a table."""

_NAME = 36


@dataclass(frozen=True, slots=True)
class Audit:
    """All that an audit found."""

    source: str
    """The model's name."""
    digest: str
    """Of the plan."""
    mode: str
    """Of the plan."""
    ranks: int
    """That it was measured on."""
    batches: int
    """Micro-batches of each rank."""
    drift: Drift
    """Of the plan from the reference."""
    own: Drift
    """Of the model's own casts: the reference with them, from the reference without."""
    gradient_cosine: float
    """Of all gradients together, with those of the reference."""
    shortlist: tuple[Estimate, ...]
    """Every cell of a forward, what is worth most first."""
    replayed: tuple[Replayed, ...]
    """Cells that were run, what changes most alone first."""
    places: tuple[Place, ...]
    """Operations that no parameter is charged with, what is worth most first."""
    gradients: tuple[GradientLine, ...]
    """Of every trained parameter, beside those of the reference."""
    updates: tuple[UpdateCost, ...]
    """Of every trained parameter; none where the plan has no optimizer of its own."""
    flips: Mapping[str, int] = field(default_factory=dict)
    """Router -> how many of its choices are other than the reference's."""
    caused: tuple[tuple[Choice, int], ...] = ()
    """Flips that each replayed cell causes alone."""
    findings: tuple[AuditFinding, ...] = ()
    """What the mode does not explain, what weighs most first."""
    recommendation: Recommendation | None = None
    """Pins and what each was worth; None where nothing drifts, or none were searched for."""
    narrower: tuple[Narrower, ...] = ()
    """What may be narrower, and what it would change."""
    passes: int = 3
    """Forwards with a backward that the shortlist took."""
    seconds: float = 0.0
    """Of the shortlist."""

    def text(self, *, color: bool = False) -> str:
        """All of it, right at 80 columns."""
        return audit_text(self, color=color)

    def to_json(self) -> dict[str, Any]:
        """Every number of it."""
        return audit_values(self)

    def __str__(self) -> str:
        return self.text()


def audit_text(audit: Audit, *, color: bool = False) -> str:
    """All of it."""
    parts: list[RenderableType] = [title("audit", audit.digest, WIDTH), pairs(facts(audit), width=WIDTH)]
    parts += [section("findings", "" if audit.findings else "none"), *_findings(audit.findings)]
    if audit.replayed:
        parts += [section("replayed", "one cell at a time"), *_replayed(audit)]
    parts += _estimates(audit)
    if audit.recommendation is not None:
        parts += _recommendation(audit.recommendation, audit.drift)
    if audit.narrower:
        parts += _narrower(audit.narrower)
    parts += _gradients(audit)
    return printed(parts, color, WIDTH)


def facts(audit: Audit) -> list[tuple[str, str]]:
    """What was measured, and how far the plan is from fp32."""
    drift = audit.drift
    told = [
        ("model", audit.source),
        ("plan", f"mode {audit.mode}, {_count(audit.ranks, 'rank')}, {_count(audit.batches, 'micro-batch')}"),
        ("drift", f"{spread(drift)}, over {drift.count:,} targets"),
        (
            "",
            f"mean {drift.mean:+.2g}, largest {drift.largest:.2g}, k3 {drift.k3:.2g}, loss {drift.loss:+.2g}",
        ),
    ]
    if drift.choices:
        share = figures.percent(drift.flips / drift.choices)
        told.append(("routing", f"{drift.flips:,} of {drift.choices:,} choices are other ({share})"))
    if audit.own.rms:
        told.append(("own casts", f"the model's code by itself: {spread(audit.own)}"))
    if stream := residual_stream(audit.places):
        first, last = stream[0], stream[-1]
        grows = f"rms {first.size:.2g} after {first.module}, {last.size:.2g} after {last.module}"
        told.append(("residual", f"{grows}; rounded by {last.relative:.2g} of it"))
    told.append(("gradients", f"cosine with those in fp32: {_cosine(audit.gradient_cosine)}"))
    told.append(("estimates", f"{audit.passes} passes in {audit.seconds:.1f} s{_moves(audit)}"))
    return told


def residual_stream(places: Sequence[Place]) -> list[Place]:
    """Sums at the end of each block, in their order; none where blocks do not leave narrow sums."""
    streams: dict[tuple[str, int], list[Place]] = {}
    for place in places:
        blocks, _, number = place.module.rpartition(".")
        if place.operation in ("add", "__add__", "add_", "__iadd__") and number.isdecimal():
            streams.setdefault((blocks, int(place.line.rpartition(":")[2])), []).append(place)
    longest = max(streams, key=lambda key: (len(streams[key]), key), default=None)
    if longest is None or len(streams[longest]) < 2:
        return []
    return sorted(streams[longest], key=lambda place: int(place.module.rpartition(".")[2]))


def _moves(audit: Audit) -> str:
    """What the estimates say of the loss, all together."""
    cells = {each.choice.cell for each in audit.shortlist}
    counted = [each.loss for each in audit.shortlist if each.choice.cell == "compute" or len(cells) == 1]
    told = [loss for loss in (*counted, *(place.loss for place in audit.places)) if loss is not None]
    return f"; together they move the loss by {sum(told):+.2g}" if told else ""


def _cosine(cosine: float) -> str:
    if not math.isfinite(cosine):
        return "none: they are not finite"
    return f"1 - {1 - cosine:.2g}" if cosine < 1 else "1"


def spread(drift: Drift) -> str:
    """`rms 5.3e-04 of a log-probability`."""
    return f"rms {drift.rms:.2g} of a log-probability"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('h') else 's'}"


# --- findings ------------------------------------------------------------------------------------------


def _findings(found: Sequence[AuditFinding]) -> Iterable[RenderableType]:
    for finding in found[:SHOWN]:
        yield Text().append(finding.kind, style="bold red").append(f"  {elide(finding.where, WIDTH - 20)}")
        yield grid([("", f"{finding.what}."), ("", finding.do)], (2,), ("",), WIDTH)
        yield Text()
    if len(found) > SHOWN:
        yield Text(f"and {len(found) - SHOWN} more", style="dim")


# --- cells ---------------------------------------------------------------------------------------------


def _replayed(audit: Audit) -> Iterable[RenderableType]:
    whole = audit.drift.square
    rows = [("parameter", "cell", "alone", "removes", "loss", "flips")]
    for each in audit.replayed[:SHOWN]:
        rows.append(
            (
                elide(each.choice.pattern, _NAME),
                each.choice.cell,
                _share(each.alone.square, whole),
                _share(whole - each.widened.square, whole),
                _loss(each.alone.loss),
                f"{each.alone.flips:,}" if each.alone.choices else "",
            )
        )
    yield _table(rows, (_NAME, 7, 7, 7, 8, 5), 2)
    yield grid(
        [
            ("alone", "its part of the squared drift, with everything else in fp32"),
            ("removes", "what is gone of it with this cell in fp32, and everything else as planned"),
            ("loss", "by how much the cell alone moves it"),
        ],
        (8,),
        ("dim",),
        WIDTH,
    )


def _estimates(audit: Audit) -> list[RenderableType]:
    """What was not replayed, and places that no parameter is charged with."""
    done = {each.choice for each in audit.replayed}
    whole = audit.drift.square
    rows = [
        (elide(each.choice.pattern, _NAME), each.choice.cell, _share(each.square, whole), _loss(each.loss))
        for each in audit.shortlist
        if each.choice not in done and each.square > 0
    ][:SHOWN]
    places = [
        (
            elide(f"{place.module or 'model'} {place.line}", _NAME),
            place.operation,
            _share(place.rms**2, whole),
            _loss(place.loss),
        )
        for place in audit.places[:SHOWN]
    ]
    parts: list[RenderableType] = []
    if rows:
        parts += [
            section("estimated", "not replayed"),
            _table([("parameter", "cell", "alone", "loss"), *rows], (_NAME, 7, 7, 8), 2),
        ]
    if places:
        head = ("module and line", "operation", "alone", "loss")
        parts += [
            section("estimated", "operations with no parameter of their own"),
            _table([head, *places], (_NAME, 20, 7, 8), 2),
        ]
    return parts


def _loss(moved: float | None) -> str:
    return "" if moved is None else f"{moved:+.1e}"


def _share(square: float, whole: float) -> str:
    if not whole:
        return "-"
    share = square / whole
    if not math.isfinite(share):
        return "-"
    if abs(share) < 0.0005:
        return "0%"
    return f"{100 * share:.1f}%"


def _table(rows: Sequence[tuple[str, ...]], widths: Sequence[int], words: int = 1) -> RenderableType:
    """Lines under a head; the first `words` columns are words and stand to the left, the others figures."""
    text = Text()
    for number, row in enumerate(rows):
        cells = [
            elide(cell, width).ljust(width) if place < words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        end = "\n" if number < len(rows) - 1 else ""
        text.append("  ".join(cells).rstrip() + end, style="dim" if not number else "")
    return text


# --- pins ----------------------------------------------------------------------------------------------


def _recommendation(advice: Recommendation, drift: Drift) -> list[RenderableType]:
    chosen = advice.points[advice.taken]
    first = advice.points[0]
    head = ("", "mode", "left", "flips", "rest", "peak", "wire", "compute", "pins")
    rows: list[tuple[str, ...]] = [head]
    for point in telling(advice):
        rows.append(
            (
                ">" if point is chosen else "",
                point.mode,
                _share(point.drift.square, drift.square),
                f"{point.drift.flips:,}" if point.drift.choices else "",
                *_more(point, first),
                _pins(point),
            )
        )
    widths = (1, 13, 6, 5, 6, 6, 6, 7)
    text = Text()
    for number, row in enumerate(rows):
        cells = [
            row[0].ljust(1),
            row[1].ljust(13),
            *(c.rjust(w) for c, w in zip(row[2:8], widths[2:], strict=True)),
        ]
        line = " ".join(cells)
        style = "dim" if not number else "bold" if row[0] else ""
        text.append(f"{line} {elide(row[8], WIDTH - len(line) - 1)}".rstrip() + "\n", style=style)
    removed = figures.percent(min(1.0, max(0.0, advice.removed)))
    told = (
        f"{removed} of the squared drift that fp32 everywhere removes, for at most {advice.budget:.1%} more "
        f"bytes {BYTES[advice.of]}:"
    )
    parts: list[RenderableType] = [section("pins", "each line was run"), text]
    if not chosen.pins and chosen.mode == first.mode:
        parts.append(Text("No pin removes a part worth a rule for that many bytes."))
        return parts
    parts += [grid([("", told)], (0,), ("",), WIDTH), Text(), Text(pasted(advice), style="green")]
    return parts


def telling(advice: Recommendation) -> list[Point]:
    """The points that say something new: the first of a mode, what takes a part away, the one that is
    recommended, and everything."""
    chosen, shown = advice.points[advice.taken], list(advice.points[:1])
    for point in advice.points[1:-1]:
        last = shown[-1]
        less = point.drift.square < last.drift.square - 0.01 * advice.points[0].drift.square
        if point is chosen or point.mode != last.mode or less:
            shown.append(point)
    return [*shown, advice.points[-1]] if len(advice.points) > 1 else shown


def _pins(point: Point) -> str:
    """`none`, `v_proj`, `3 + v_proj`: how many there were before the last one."""
    if not point.pins:
        return "none"
    pattern = point.pins[-1][0]
    last = _tail(pattern.removesuffix(".*").removesuffix(".bias")) if pattern != "*" else "everything"
    return last if len(point.pins) == 1 else f"{len(point.pins) - 1} + {last}"


BYTES = {"rest": "at rest", "peak": "at peak", "wire": "on the wire"}


def _more(point: Point, first: Point) -> tuple[str, ...]:
    now, before = asdict(point.bytes), asdict(first.bytes)
    return tuple(_change(now[key], before[key]) for key in ("rest", "peak", "wire", "compute"))


def _change(now: int, before: int) -> str:
    if now == before:
        return "="
    return f"{100 * (now / before - 1):+.1f}%" if before else "new"


def pasted(advice: Recommendation) -> str:
    """What goes into the config, in YAML."""
    chosen = advice.points[advice.taken]
    lines = ["precision:", f"  mode: {chosen.mode}"]
    if advice.rules:
        lines.append("  rules:")
    for rule in advice.rules:
        inner = ", ".join(f"{key}: {_quoted(key, value)}" for key, value in rule.items())
        lines.append(f"    - {{{inner}}}")
    return "\n".join(lines)


def _quoted(key: str, value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if key == "match" else value


def _narrower(found: Sequence[Narrower]) -> list[RenderableType]:
    """What may be narrower, and what it saves."""
    rows: list[tuple[str, ...]] = [("column", "median", "worst", "", "rest", "peak", "wire")]
    for one in found:
        now, before = asdict(one.after), asdict(one.before)
        more = (_change(now[key], before[key]) for key in ("rest", "peak", "wire"))
        moved = "gradient" if one.column == "reduce" else "update"
        rows.append(
            (
                f"{one.column} {one.value}",
                figures.percent(one.middle),
                figures.percent(one.most),
                _tail(one.worst),
                *more,
            )
        )
        if one.many:
            rows.append(("", "", "", f"{_count(one.many, moved)} by more than 5%", "", "", ""))
    widths = (12, 7, 7, 24, 7, 7, 7)
    text = Text()
    for number, row in enumerate(rows):
        cells = [
            elide(cell, width).ljust(width) if place in (0, 3) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        text.append(" ".join(cells).rstrip() + "\n", style="dim" if not number else "")
    return [section("narrower", "what it changes of a gradient's or an update's norm"), text]


def _tail(name: str) -> str:
    """The end of a name, which tells most."""
    return ".".join(name.removesuffix(".weight").split(".")[-2:])


# --- gradients -----------------------------------------------------------------------------------------


def _gradients(audit: Audit) -> list[RenderableType]:
    worst = sorted(audit.gradients, key=lambda line: -line.relative)[:5]
    rows = [("parameter", "from fp32", "accumulate", "reduce")]
    rows += [
        (elide(line.name, _NAME), f"{line.relative:.2g}", _or_dash(line.accumulate), _or_dash(line.reduce))
        for line in worst
    ]
    lost = sorted(audit.updates, key=lambda cost: -(cost.lost + cost.stuck))[:5]
    parts: list[RenderableType] = [
        section("gradients", "norm of the difference over the norm"),
        _table(rows, (_NAME, 10, 10, 8)),
    ]
    if lost and lost[0].lost + lost[0].stuck > 0:
        head = ("parameter", "lost", "stuck", "underflow")
        table = [
            (
                elide(cost.name, _NAME),
                figures.percent(cost.lost),
                figures.percent(cost.stuck),
                figures.percent(cost.underflow),
            )
            for cost in lost
        ]
        parts += [section("updates", "shares of elements"), _table([head, *table], (_NAME, 8, 8, 10))]
    return parts


def _or_dash(value: float) -> str:
    return f"{value:.2g}" if value else "-"


# --- JSON ----------------------------------------------------------------------------------------------


def audit_json(audit: Audit) -> str:
    """Every number of it."""
    return json.dumps(audit_values(audit), indent=2) + "\n"


def audit_values(audit: Audit) -> dict[str, Any]:
    """The same as values."""
    value: dict[str, Any] = _plain(asdict(audit))
    if audit.recommendation is not None:
        value["recommendation"]["removed"] = audit.recommendation.removed
        value["recommendation"]["config"] = pasted(audit.recommendation)
    return value


def _plain(value: Any) -> Any:
    """What JSON has: a number that is none is told by its name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
