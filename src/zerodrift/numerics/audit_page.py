"""An audit as one HTML page that needs nothing else: the findings, a map of where drift begins, the curve of
pins, and what was replayed.

The words are those of `audit_text`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from zerodrift.numerics.audit_text import BYTES, Audit, facts, pasted, telling
from zerodrift.numerics.nouns import AuditFinding, Point, Recommendation
from zerodrift.report.figures import percent
from zerodrift.report.markup import Markup, join, tag
from zerodrift.report.page import breaking, document, heads, section

CELLS = ("storage", "compute", "accumulate", "reduce", "gradient", "lost")
"""Columns of the map: two of the forward, in parts of the drift; then the gradient, and the update."""

WIDE, HIGH, EDGE = 640, 260, 44


def audit_page(audit: Audit) -> str:
    """The whole audit."""
    told = [tag("div", tag("dt", label), tag("dd", value)) for label, value in facts(audit)]
    body = [
        tag("header", tag("h1", "zerodrift audit"), tag("dl", told, class_="facts")),
        section("Findings", _findings(audit.findings), id="findings"),
        section("Where drift begins", *_map(audit), id="map"),
    ]
    if audit.recommendation is not None:
        body.append(section("Pins", *_pins(audit, audit.recommendation), id="pins"))
    if audit.replayed:
        body.append(section("Replayed", _replayed(audit), id="replayed"))
    if audit.places:
        body.append(section("Operations with no parameter of their own", _places(audit), id="places"))
    return document(f"zerodrift audit: {audit.source}", body, _STYLE)


_STYLE = """
dl.findings > div { display: grid; grid-template-columns: 9rem 1fr; padding: .6rem 0;
  border-top: 1px solid var(--rule); }
dl.findings dt { font-weight: 600; }
dl.findings dd { margin: 0; max-width: 46rem; }
table.map { border-collapse: separate; border-spacing: 2px; }
table.map td.heat { min-width: 6.5rem; text-align: right; font-variant-numeric: tabular-nums;
  border-radius: 3px; }
svg.curve { display: block; max-width: 100%; height: auto; background: var(--card);
  border: 1px solid var(--rule); border-radius: 8px; }
svg.curve text { font: 12px system-ui, sans-serif; fill: var(--quiet); }
svg.curve .axis { stroke: var(--rule); }
svg.curve .line { fill: none; stroke-width: 2; }
svg.curve circle { stroke: var(--card); stroke-width: 1.5; }
pre { padding: 14px 18px; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  overflow-x: auto; }
@media (max-width: 40rem) { dl.findings > div { display: block; } }
"""


def _findings(found: Sequence[AuditFinding]) -> Markup:
    if not found:
        return tag("p", "None.")
    rows = (
        tag(
            "div",
            tag("dt", finding.kind),
            tag(
                "dd",
                tag("div", breaking(finding.where)),
                tag("div", f"{finding.what}."),
                tag("div", finding.do, class_="quiet"),
            ),
        )
        for finding in found
    )
    return tag("dl", rows, class_="findings")


# --- the map -------------------------------------------------------------------------------------------


def layer(name: str) -> str:
    """The numbered module that a parameter is in, `model.layers.3`; else its own module."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found.group(1) if found else name.rpartition(".")[0] or name


def heat(audit: Audit) -> dict[str, dict[str, float]]:
    """Layer -> cell -> how much, of 1: parts of the squared drift, of the norm, of the elements."""
    rows: dict[str, dict[str, float]] = {}
    whole = audit.drift.square or 1.0
    for estimate in audit.shortlist:
        row = rows.setdefault(layer(estimate.choice.names[0]), {})
        forward = str(estimate.choice.cell)
        row[forward] = row.get(forward, 0.0) + estimate.square / whole
    for line in audit.gradients:
        row = rows.setdefault(layer(line.name), {})
        for cell, value in (
            ("gradient", line.relative),
            ("accumulate", line.accumulate),
            ("reduce", line.reduce),
        ):
            row[cell] = max(row.get(cell, 0.0), value)
    for cost in audit.updates:
        row = rows.setdefault(layer(cost.name), {})
        row["lost"] = max(row.get("lost", 0.0), cost.lost)
    return rows


def _map(audit: Audit) -> list[Markup]:
    rows = heat(audit)
    shown = [cell for cell in CELLS if any(row.get(cell, 0.0) for row in rows.values())]
    if not shown:
        return [tag("p", "Nowhere: nothing is narrower than fp32.")]
    lines = [
        tag("tr", tag("th", breaking(name), scope="row"), [_heat(row.get(cell, 0.0)) for cell in shown])
        for name, row in rows.items()
    ]
    table = tag("table", tag("thead", tag("tr", heads(("", *shown)))), tag("tbody", lines), class_="map")
    words = (
        "storage and compute: estimated parts of the squared drift. gradient: distance from the gradient in "
        "fp32 over its norm, accumulate and reduce what these columns alone do to it; lost: elements whose "
        "update is remembered nowhere. The worst parameter of a layer stands for it."
    )
    return [tag("div", table, class_="scroll"), tag("p", words, class_="quiet")]


def _heat(value: float) -> Markup:
    """Darker by the logarithm, from a thousandth to all."""
    strength = max(0.0, min(1.0, 1 + math.log10(value) / 3)) if value > 0 else 0.0
    style = f"background: rgba(214, 69, 65, {0.75 * strength:.2f})"
    return tag("td", percent(value) if value >= 5e-5 else "", class_="heat", style=style)


# --- pins ----------------------------------------------------------------------------------------------


def _pins(audit: Audit, advice: Recommendation) -> list[Markup]:
    first, chosen = advice.points[0], advice.points[advice.taken]
    head = ("", "mode", "pins", "left", "flips", "rest", "peak", "wire", "compute")
    rows = [_point(audit, point, first, chosen) for point in telling(advice)]
    removed = percent(min(1.0, max(0.0, advice.removed)))
    words = (
        f"The marked line removes {removed} of the squared drift that fp32 everywhere removes, for at most "
        f"{advice.budget:.1%} more bytes {BYTES[advice.of]}. Every line was run."
    )
    return [
        _curve(audit, advice),
        tag("p", words),
        tag("pre", pasted(advice)),
        tag("div", tag("table", tag("thead", tag("tr", heads(head))), tag("tbody", rows), class_="rows"),
            class_="scroll"),
    ]  # fmt: skip


def _point(audit: Audit, point: Point, first: Point, chosen: Point) -> Markup:
    whole = audit.drift.square or 1.0
    pairs = zip(
        (point.bytes.rest, point.bytes.peak, point.bytes.wire, point.bytes.compute),
        (first.bytes.rest, first.bytes.peak, first.bytes.wire, first.bytes.compute),
        strict=True,
    )
    more = [
        "=" if now == before else f"{100 * (now / before - 1):+.1f}%" if before else "new"
        for now, before in pairs
    ]
    return tag(
        "tr",
        tag("td", ">" if point is chosen else ""),
        tag("td", point.mode, class_="cell"),
        tag("td", join(breaking(f"{pattern} ") for pattern, _, _ in point.pins) or "none", class_="name"),
        tag("td", percent(point.drift.square / whole), class_="number"),
        tag("td", f"{point.drift.flips:,}" if point.drift.choices else "", class_="number"),
        [tag("td", text, class_="number") for text in more],
    )


_COLORS = ("#2f6fd0", "#d9822b", "#23936a")


def _curve(audit: Audit, advice: Recommendation) -> Markup:
    """Bytes that a forward reads of the weights, against what is left of the drift."""
    whole = audit.drift.square or 1.0
    low = min(point.bytes.compute for point in advice.points)
    high = max(point.bytes.compute for point in advice.points)
    most = max(1.0, *(point.drift.square / whole for point in advice.points))

    def place(point: Point) -> tuple[float, float]:
        across = (point.bytes.compute - low) / max(1, high - low)
        down = 1 - point.drift.square / whole / most
        return EDGE + across * (WIDE - 2 * EDGE), EDGE / 2 + down * (HIGH - 1.6 * EDGE)

    drawn: list[Markup] = []
    bottom = EDGE / 2 + (HIGH - 1.6 * EDGE)
    for level in (0.0, 0.5, 1.0):
        y = bottom - level / most * (HIGH - 1.6 * EDGE)
        drawn.append(tag("line", x1=EDGE, x2=WIDE - EDGE, y1=y, y2=y, class_="axis"))
        drawn.append(tag("text", f"{level:.0%}", x=EDGE - 8, y=y + 4, text_anchor="end"))
    modes = list(dict.fromkeys(point.mode for point in advice.points))
    for mode, color in zip(modes, _COLORS, strict=False):
        own = sorted(
            (point for point in advice.points if point.mode == mode), key=lambda point: point.bytes.compute
        )
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, own))
        drawn.append(tag("polyline", points=path, class_="line", stroke=color))
        for point in own:
            x, y = place(point)
            size = 7 if point is advice.points[advice.taken] else 4
            names = ", ".join(pattern for pattern, _, _ in point.pins) or "no pins"
            label = f"{mode}, {names}: {percent(point.drift.square / whole)} left"
            drawn.append(tag("circle", tag("title", label), cx=x, cy=y, r=size, fill=color))
        drawn.append(tag("text", mode, x=EDGE + 8 + 100 * modes.index(mode), y=15,
                         style=f"fill: {color}"))  # fmt: skip
    foot = HIGH - 8
    drawn.append(
        tag("text", "bytes that a forward reads of the weights", x=WIDE / 2, y=foot, text_anchor="middle")
    )
    drawn.append(tag("text", "=", x=EDGE, y=foot, text_anchor="middle"))
    drawn.append(
        tag("text", f"{100 * (high / max(1, low) - 1):+.0f}%", x=WIDE - EDGE, y=foot, text_anchor="middle")
    )
    return tag("svg", drawn, class_="curve", viewBox=f"0 0 {WIDE} {HIGH}", width=WIDE, role="img",
               aria_label="What is left of the squared drift, by bytes")  # fmt: skip


# --- what was replayed, and what was not ---------------------------------------------------------------


def _replayed(audit: Audit) -> Markup:
    whole = audit.drift.square or 1.0
    rows = (
        tag(
            "tr",
            tag("td", breaking(each.choice.pattern), class_="name"),
            tag("td", each.choice.cell, class_="cell"),
            tag("td", percent(each.alone.square / whole), class_="number"),
            tag("td", percent(max(0.0, 1 - each.widened.square / whole)), class_="number"),
            tag("td", f"{each.alone.flips:,}" if each.alone.choices else "", class_="number"),
            tag("td", f"{each.alone.loss:+.2g}", class_="number"),
        )
        for each in audit.replayed
    )
    head = heads(("parameter", "cell", "alone", "removes", "flips", "loss"))
    return tag("table", tag("thead", tag("tr", head)), tag("tbody", rows), class_="rows")


def _places(audit: Audit) -> Markup:
    whole = audit.drift.square or 1.0
    rows = (
        tag(
            "tr",
            tag("td", breaking(place.module or "the model"), class_="name"),
            tag("td", place.line, class_="cell"),
            tag("td", place.operation, class_="cell"),
            tag("td", place.dtype, class_="cell"),
            tag("td", percent(place.rms**2 / whole), class_="number"),
            tag("td", "" if place.loss is None else f"{place.loss:+.2g}", class_="number"),
        )
        for place in audit.places[:40]
    )
    head = heads(("module", "line", "operation", "leaves", "estimate", "loss"))
    return tag("table", tag("thead", tag("tr", head)), tag("tbody", rows), class_="rows")
