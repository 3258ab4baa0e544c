"""An audit as one HTML page without other files: findings, a map of where drift begins, the curve of pins,
replayed cells. The words are those of `text`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from importlib import resources

from zerodrift.inspect.audit.results import Point, Recommendation
from zerodrift.inspect.audit.text import (
    BYTES,
    Audit,
    bytes_changed,
    cell_tables,
    config_text,
    facts,
    points_to_show,
)
from zerodrift.report.figures import percent
from zerodrift.report.markup import Child, Markup, join, tag
from zerodrift.report.page import breaking, document, heads, section

COLUMNS = ("storage", "compute", "accumulate", "reduce", "gradient", "lost")
"""Columns of the map: two of the forward, then of the gradient, then the update."""


def audit_page(audit: Audit) -> str:
    pairs = [tag("div", tag("dt", label), tag("dd", value)) for label, value in facts(audit)]
    body = [
        tag("header", tag("h1", "zerodrift audit"), tag("dl", pairs, class_="facts")),
        section("Findings", _findings(audit), id="findings"),
        section("Where drift begins", *_map(audit), id="map"),
    ]
    whole = audit.drift.square or 1.0
    if audit.recommendation is not None:
        body.append(section("Pins", *_pins(whole, audit.recommendation), id="pins"))
    for number, (name, detail, (head, *rows)) in enumerate(cell_tables(audit)):
        words = ((breaking(first), *rest) for first, *rest in rows)
        shown, title = _table(head, ("name", "cell"), words), f"{name}: {detail}".capitalize()
        body.append(section(title, shown, id=f"{name}-{number}"))
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return document(f"zerodrift audit: {audit.source}", body, "\n" + style)


def _table(head: Sequence[str], classes: Sequence[str], rows: Iterable[Sequence[Child]]) -> Markup:
    """A table whose first columns have these classes; the others are figures."""

    def cell(number: int, text: Child) -> Markup:
        kind = classes[number] if number < len(classes) else "number"
        return tag("td", text, class_=kind or False)

    lines = [tag("tr", [cell(number, text) for number, text in enumerate(row)]) for row in rows]
    return tag("table", tag("thead", tag("tr", heads(head))), tag("tbody", lines), class_="rows")


def _findings(audit: Audit) -> Markup:
    if not audit.findings:
        return tag("p", "None.")
    rows = []
    for finding in audit.findings:
        where, what = tag("div", breaking(finding.where)), tag("div", f"{finding.what}.")
        text = tag("dd", where, what, tag("div", finding.do, class_="quiet"))
        rows.append(tag("div", tag("dt", finding.kind), text))
    return tag("dl", rows, class_="findings")


def _map(audit: Audit) -> list[Markup]:
    """Layer by column, shares of the squared drift, of the norm, of the elements."""
    layers: dict[str, dict[str, float]] = {}
    whole = audit.drift.square or 1.0

    def layer(name: str) -> dict[str, float]:
        numbered = re.match(r"(.*?\.\d+)\.", name)
        return layers.setdefault(numbered.group(1) if numbered else name.rpartition(".")[0] or name, {})

    for estimate in audit.shortlist:
        row, cell = layer(estimate.choice.names[0]), estimate.choice.cell
        row[cell] = row.get(cell, 0.0) + estimate.square / whole
    for line in audit.gradients:
        row = layer(line.name)
        found = {"gradient": line.relative, "accumulate": line.accumulate, "reduce": line.reduce}
        row |= {cell: max(row.get(cell, 0.0), value) for cell, value in found.items()}
    for cost in audit.updates:
        row = layer(cost.name)
        row["lost"] = max(row.get("lost", 0.0), cost.lost)
    shown = [cell for cell in COLUMNS if any(row.get(cell, 0.0) for row in layers.values())]
    if not shown:
        return [tag("p", "Nowhere: nothing is narrower than fp32.")]
    lines = [
        tag("tr", tag("th", breaking(name), scope="row"), [_heat(row.get(cell, 0.0)) for cell in shown])
        for name, row in layers.items()
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


def _pins(whole: float, advice: Recommendation) -> list[Markup]:
    def row(point: Point) -> list[Child]:
        pins = join(breaking(f"{pattern} ") for pattern, _, _ in point.pins) or "none"
        flips = f"{point.drift.flips:,}" if point.drift.choices else ""
        changes = bytes_changed(point.bytes, advice.points[0].bytes)
        mark = ">" if point is advice.chosen else ""
        return [mark, point.mode, pins, percent(point.drift.square / whole), flips, *changes]

    head = ("", "mode", "pins", "left", "flips", "rest", "peak", "wire", "compute")
    table = _table(head, ("", "cell", "name"), map(row, points_to_show(advice)))
    words = (
        f"The marked line removes {percent(min(1.0, max(0.0, advice.removed)))} of the squared drift that "
        f"fp32 everywhere removes, for at most {advice.budget:.1%} more bytes {BYTES[advice.of]}. Every line "
        "was run."
    )
    shown = tag("div", table, class_="scroll")
    return [_curve(whole, advice), tag("p", words), tag("pre", config_text(advice)), shown]


def _curve(whole: float, advice: Recommendation) -> Markup:
    """The drift that is left, against the bytes that a forward reads of the weights."""
    width, height, edge = 640, 260, 44
    room, points = height - 1.6 * edge, advice.points
    low = min(point.bytes.compute for point in points)
    high = max(point.bytes.compute for point in points)
    most = max(1.0, *(point.drift.square / whole for point in points))

    def down(left: float) -> float:
        return edge / 2 + (1 - left / most) * room

    def label(text: str, x: float, y: float, anchor: str = "middle") -> Markup:
        return tag("text", text, x=x, y=y, text_anchor=anchor)

    drawn: list[Markup] = []
    for level in (0.0, 0.5, 1.0):
        y = down(level)
        drawn.append(tag("line", x1=edge, x2=width - edge, y1=y, y2=y, class_="axis"))
        drawn.append(label(f"{level:.0%}", edge - 8, y + 4, "end"))
    modes = dict.fromkeys(point.mode for point in points)
    for number, (mode, color) in enumerate(zip(modes, ("#2f6fd0", "#d9822b", "#23936a"), strict=False)):
        path, circles = [], []
        own = (point for point in points if point.mode == mode)
        for point in sorted(own, key=lambda point: point.bytes.compute):
            left = point.drift.square / whole
            x = edge + (point.bytes.compute - low) / max(1, high - low) * (width - 2 * edge)
            path.append(f"{x:.1f},{down(left):.1f}")
            names = ", ".join(pattern for pattern, _, _ in point.pins) or "no pins"
            name = tag("title", f"{mode}, {names}: {percent(left)} left")
            size = 7 if point is advice.chosen else 4
            circles.append(tag("circle", name, cx=x, cy=down(left), r=size, fill=color))
        drawn.append(tag("polyline", points=" ".join(path), class_="line", stroke=color))
        drawn += [*circles, tag("text", mode, x=edge + 8 + 100 * number, y=15, style=f"fill: {color}")]
    foot = height - 8
    drawn.append(label("bytes that a forward reads of the weights", width / 2, foot))
    drawn += [label("=", edge, foot), label(f"{100 * (high / max(1, low) - 1):+.0f}%", width - edge, foot)]
    return tag(
        "svg", drawn, class_="curve", viewBox=f"0 0 {width} {height}", width=width, role="img",
        aria_label="What is left of the squared drift, by bytes",
    )  # fmt: skip
