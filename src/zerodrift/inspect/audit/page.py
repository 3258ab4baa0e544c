"""An audit as one HTML page without other files: findings, a map of where drift begins, the curve of pins,
replayed cells. The words are those of `text`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from zerodrift.inspect.audit import advice_rows, text
from zerodrift.inspect.audit.results import FormatAdvice, Point, Recommendation
from zerodrift.inspect.audit.text import Audit
from zerodrift.report import (
    BlockRow,
    Chart,
    FactList,
    PageCell,
    PageHead,
    PageSection,
    PageTable,
    Paragraph,
    Preformatted,
    Series,
    chart,
    page,
    percent,
    size,
)

Cells = Sequence[str | PageCell]

COLUMNS = ("storage", "compute", "accumulate", "reduce", "gradient", "lost")
"""Columns of the map: two of the forward, then of the gradient, then the update."""


def audit_page(audit: Audit) -> str:
    found = [(each.kind, each.where, f"{each.what}.", each.do) for each in audit.findings]
    findings = FactList(found, "findings") if found else Paragraph("None.", "")
    sections = [
        PageSection("Findings", "findings", [findings]),
        PageSection("Where drift begins", "map", _map(audit)),
    ]
    if audit.recommendation is not None:
        sections.append(PageSection("Pins", "pins", _pins(audit.drift.square or 1.0, audit.recommendation)))
    if audit.formats is not None:
        sections.append(PageSection("Narrow formats", "formats", _formats(audit.formats)))
    for number, (name, detail, (head, *rows)) in enumerate(text.cell_tables(audit)):
        cells: list[Cells] = [
            (PageCell(first, "name"), PageCell(second, "cell"), *rest) for first, second, *rest in rows
        ]
        title, table = f"{name}: {detail}".capitalize(), PageTable(head, cells, "rows", figures=head[2:])
        sections.append(PageSection(title, f"{name}-{number}", [table]))
    top = PageHead("zerodrift audit", facts=text.facts(audit))
    return page(f"zerodrift audit: {audit.source}", top, sections)


def _map(audit: Audit) -> list[Any]:
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
        return [Paragraph("Nowhere: nothing is narrower than fp32.", "")]
    rows = [
        (PageCell(name, is_head=True), *(_heat(row.get(cell, 0.0)) for cell in shown))
        for name, row in layers.items()
    ]
    words = (
        "storage and compute: estimated parts of the squared drift. gradient: distance from the gradient in "
        "fp32 over its norm, accumulate and reduce what these columns alone do to it; lost: elements whose "
        "update is remembered nowhere. The worst parameter of a layer stands for it."
    )
    return [PageTable(("", *shown), rows, "map", figures=()), Paragraph(words)]


def _heat(value: float) -> PageCell:
    """Return a cell that is darker by the logarithm, from a thousandth to all."""
    strength = max(0.0, min(1.0, 1 + math.log10(value) / 3)) if value > 0 else 0.0
    return PageCell(percent(value) if value >= 5e-5 else "", heat=strength)


def _pins(whole: float, advice: Recommendation) -> list[Any]:
    rows: list[Cells] = []
    for point in advice_rows.points_to_show(advice):
        mark = ">" if point is advice.chosen else ""
        pins = PageCell(" ".join(pattern for pattern, _, _ in point.pins) or "none", "name")
        flips = f"{point.drift.flips:,}" if point.drift.choices else ""
        changes = advice_rows.bytes_changed(point.bytes, advice.points[0].bytes)
        left = percent(point.drift.square / whole)
        rows.append((mark, PageCell(point.mode, "cell"), pins, left, flips, *changes))
    head = ("", "mode", "pins", "left", "flips", "rest", "peak", "wire", "compute")
    words = (
        f"The marked line removes {percent(min(1.0, max(0.0, advice.removed)))} of the squared drift that "
        f"fp32 everywhere removes, for at most {advice.budget:.1%} more bytes {text.BYTES[advice.of]}. Every "
        "line was run."
    )
    table = PageTable(head, rows, "rows", figures=head[3:])
    return [_curve(whole, advice), Paragraph(words, ""), Preformatted(text.config_text(advice)), table]


def _formats(advice: FormatAdvice) -> list[Any]:
    head, *rows = advice_rows.format_table(advice)
    cells: list[Cells] = [
        (mark, PageCell(pattern, "name"), PageCell(column, "cell"), PageCell(word, "cell"), *figures)
        for mark, pattern, column, word, *figures in rows
    ]
    told: list[Any] = [Paragraph(f"Formats for {advice.goal.of}; every line was run.", "")]
    told += [PageTable(head, cells, "rows", figures=head[4:])] if cells else []
    told += [Paragraph(line, "") for line in advice_rows.format_facts(advice)]
    told += [Preformatted(text.rules_text(advice.rules))] if advice.rules else []
    told += [
        Paragraph(f"Not run, {reason}: {names}.") for reason, names in advice_rows.formats_left_out(advice)
    ]
    return told


def _curve(whole: float, advice: Recommendation) -> BlockRow:
    """Draw the drift that is left, against the bytes that a forward reads of the weights."""

    def series(label: str, color: str, points: list[Point]) -> Series:
        points = sorted(points, key=lambda point: point.bytes.compute)
        dots = []
        for point in points:
            names = ", ".join(pattern for pattern, _, _ in point.pins) or "no pins"
            dots.append(f"{point.mode}, {names}: {percent(point.drift.square / whole)} left")
        places = [(float(point.bytes.compute), point.drift.square / whole) for point in points]
        return Series(label, color, places, dots=dots)

    modes = dict.fromkeys(point.mode for point in advice.points)
    lines = [
        series(mode, color, [point for point in advice.points if point.mode == mode])
        for mode, color in zip(modes, ("storage", "accumulate", "state"), strict=False)
    ]
    if advice.chosen is not None:
        lines.append(series("the marked line", "master", [advice.chosen]))
    title = "Squared drift that is left, by bytes that a forward reads of the weights"
    drawn = chart(Chart(title, lines, percent, from_zero=True, across=lambda count: size(round(count))))
    return BlockRow([drawn], "charts one")
