"""The result of a check as text and as one HTML page: cells, what showed them, and what they cost.

The text is 80 columns wide, so that it can be pasted into an issue, and narrower only on a narrower terminal.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from zerodrift import report
from zerodrift.inspect.check.fixes import fixes
from zerodrift.inspect.check.table import ParameterGroup, RunFinding, cell, elements, folded, groups, short
from zerodrift.inspect.trace import COLUMNS, Column, ModelRecord, ParameterRecord, ProcessRecord, Sighting

WIDTH = 80

_GROUP_NAMES = 6  # printed of a group
_FINDING_NAMES = 3  # printed of a finding

_WHAT_TO_DO = operator.attrgetter("do")  # adjacent findings that one thing to do fixes are shown together

_STYLES = {"fp32": "green", "fp64": "green", "same": "", "bf16": "cyan", "fp16": "magenta"}


def facts(processes: Sequence[ProcessRecord]) -> list[tuple[str, str]]:
    first = processes[0]
    ranks = f"{len(processes)} of {first.world}" if len(processes) < first.world else str(first.world)
    micro = f", {first.micro_batches} micro-batches in the last" if first.micro_batches > 1 else ""
    return [
        ("watched", f"{first.steps} optimizer step{'s' * (first.steps != 1)}{micro}, ranks: {ranks}"),
        ("libraries", ", ".join(f"{name} {of}" for name, of in first.libraries.items() if "." not in name)),
    ]


def _trained(process: ProcessRecord) -> list[str]:
    return [p.name for model in process.models for p in model.parameters if p.trained]


def _finding_names(finding: RunFinding, trained: Sequence[str]) -> str:
    if list(finding.names) == trained:
        return "every parameter that is trained"
    return _first(folded(finding.names), _FINDING_NAMES)


def _first(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _evidence(sighting: Sighting) -> str:
    where = f" in {sighting.module}" if sighting.module else ""
    return f"{sighting.by}{where}" + (f", {sighting.line}" if sighting.line else "")


def run_text(
    processes: Sequence[ProcessRecord],
    findings: Sequence[RunFinding],
    notes: Iterable[str],
    *,
    color: bool,
    width: int = WIDTH,
) -> str:
    """Return the table of the first rank, the findings and the notes."""
    first = processes[0]
    parts: list[RenderableType] = [report.title("check", "", width)]
    parts.append(report.pairs(facts(processes), width=width))
    for model in first.models:
        parts += _model(model, width)
    parts += _findings(findings, _trained(first), width)
    blocks = fixes(processes, findings)
    parts += [report.section("config", "that fixes them")] if blocks else []
    for library, code in blocks:
        code = code if width >= WIDTH else re.sub(" +# ", "  # ", code)
        parts += [Text(library, style="dim"), Padding(Text(code), (0, 0, 0, 2)), Text()]
    if listed := [("!", note) for note in (*notes, *first.notes)]:
        parts += [report.section("notes"), report.grid(listed, (1,), ("bold yellow",), width)]
    return report.render(parts, color, width)


def _model(model: ModelRecord, width: int) -> list[RenderableType]:
    around = f" in {' in '.join(reversed(model.wrappers))}" if model.wrappers else ""
    numel = report.elements(elements(model.parameters))
    counted = f"{len(model.parameters):,} parameters, {numel} elements"
    counted += "" if model.trained else ", none of them updated"
    parts: list[RenderableType] = [report.section(model.name + around), Text(counted, style="dim"), Text()]
    if not model.parameters:
        return parts
    made = groups(model)
    seen_in = [report.section("seen in", "the first of each"), _sightings(made, width)]
    widths = [max(len(name), *(len(cells[n]) for cells, _ in made)) for n, name in enumerate(COLUMNS)]
    if sum(widths) + len(widths) > width:  # then dtypes of one cell stand below each other
        words = [[word for cells, _ in made for word in cells[n].split(" ")] for n in range(len(COLUMNS))]
        widths = [max(len(name), *map(len, words[n])) for n, name in enumerate(COLUMNS)]
    if sum(widths) + len(widths) > width:  # a terminal that is narrower than the nine columns
        for cells, parameters in made:
            parts += [*_cells_in_lines(cells, width), _group_names(parameters, width)]
        return [*parts, *seen_in]
    parts.append(_line([(name, "dim") for name in COLUMNS], widths))
    for cells, parameters in made:
        texts = zip(cells, widths, strict=True)
        stacked = [[text] if len(text) <= room else text.split(" ") for text, room in texts]
        for row in zip_longest(*stacked, fillvalue=""):
            styled = [(text, _STYLES.get(text.split(" ")[0], "dim") if text else "") for text in row]
            parts.append(_line(styled, widths))
        parts.append(_group_names(parameters, width))
    return [*parts, *seen_in]


def _cells_in_lines(cells: Sequence[str], width: int) -> list[Text]:
    """Return each cell behind the name of its column, as many to a line as fit."""
    lines = [Text()]
    for name, text in zip(COLUMNS, cells, strict=True):
        if len(lines[-1]) + len(name) + len(text) + 1 > width:
            lines.append(Text())
        lines[-1].append(f"{name} ", style="dim").append(text, style=_STYLES.get(text.split(" ")[0], ""))
        lines[-1].append("  ")
    return lines


def _line(cells: Sequence[tuple[str, str]], widths: Sequence[int]) -> Text:
    line = Text()
    for (text, style), width in zip(cells, widths, strict=True):
        line.append(text.ljust(width), style=style).append(" ")
    return line


def _group_names(parameters: Sequence[ParameterRecord], width: int) -> RenderableType:
    names = folded(parameter.name for parameter in parameters)
    listed = _first([report.elide(name, width - 4) for name in names], _GROUP_NAMES)
    frozen = "" if parameters[0].trained else ", frozen"
    text = Text(f"{report.elements(elements(parameters))} elements{frozen}: ", style="dim")
    return Padding(text.append_text(report.legible_text(listed)), (0, 0, 0, 2))


def _sightings(made: Sequence[ParameterGroup], width: int) -> RenderableType:
    """Return the first sighting of each dtype in each column, and the reasons of empty cells."""
    firsts: dict[tuple[Column, str], str] = {}
    for column in COLUMNS:
        for parameter in (parameters[0] for _, parameters in made):
            for sighting in parameter.cells.get(column, ()):
                if sighting.line or column not in ("storage", "master"):
                    firsts.setdefault((column, short(sighting.dtype)), _evidence(sighting))
            if column in parameter.unseen:
                firsts.setdefault((column, "-"), parameter.unseen[column])
    return report.grid([(*key, text) for key, text in firsts.items()], (10, 9), ("dim", "bold"), width)


def _findings(findings: Sequence[RunFinding], trained: Sequence[str], width: int) -> list[RenderableType]:
    """Return what to do, each with the findings that it fixes; the first is what costs most."""
    causes = [list(alike) for _, alike in groupby(findings, key=_WHAT_TO_DO)]
    of = f", with {len(causes)} causes; the costliest first" if len(causes) > 1 else ""
    parts: list[RenderableType] = [report.section("findings", f"{len(findings)}{of}" if findings else "none")]
    for number, alike in enumerate(causes, 1):
        parts.append(report.grid([(str(number), alike[0].do)], (2,), ("bold yellow",), width))
        for finding in alike:
            head = finding.kind + (f", {finding.column}" if finding.column else "")
            line = f"{finding.line}: " if finding.line else ""
            lines = [_finding_names(finding, trained), line + finding.what]
            below = report.grid([("", text) for text in lines if text], (1,), ("",), width - 3)
            parts += [Padding(Text(head, style="bold"), (0, 0, 0, 3)), Padding(below, (0, 0, 0, 2))]
        if number < len(causes):
            parts.append(Text())
    return parts


def run_page(
    processes: Sequence[ProcessRecord], findings: Sequence[RunFinding], notes: Iterable[str], command: str
) -> str:
    """Return one HTML page that needs no other file."""
    first = processes[0]
    listed, trained = [*notes, *first.notes], _trained(first)
    rows = [
        (*(("", "") if place else (str(number), f.do)), f.kind, f.column or "", _finding_names(f, trained),
         f"{f.line} {f.what}".strip())
        for number, (_, alike) in enumerate(groupby(findings, key=_WHAT_TO_DO), 1)
        for place, f in enumerate(alike)
    ]  # fmt: skip
    heads = ("", "what to do", "finding", "column", "parameters", "what it costs")
    found = report.PageTable(heads, rows) if rows else report.Paragraph("None.", "")
    sections = [
        report.PageSection("", "", [report.NoteList(listed)] if listed else ()),
        report.PageSection("Findings", "findings", [found]),
    ]
    blocks = fixes(processes, findings)
    texts = [
        part
        for library, code in blocks
        for part in (report.Paragraph(library, ""), report.Preformatted(code))
    ]
    sections += [report.PageSection("Config that fixes them", "config", texts)] if blocks else []
    for number, model in enumerate(first.models):
        title = " in ".join([model.name, *reversed(model.wrappers)])
        lines = [_row(parameter) for _, parameters in groups(model) for parameter in parameters]
        table = report.PageTable(("parameter", "shape", "elements", *COLUMNS), lines, "rows")
        sections.append(report.PageSection(title, f"model-{number}", [table]))
    head = report.PageHead("zerodrift check", facts=[("command", command), *facts(processes)])
    return report.page(f"zerodrift check: {command}", head, sections)


def _row(parameter: ParameterRecord) -> list[str | report.PageCell]:
    below = [*(f"= {name}" for name in parameter.also), *([parameter.layout] if parameter.layout else [])]
    name = report.PageCell(parameter.name, "name", badge="" if parameter.trained else "frozen", below=below)
    cells = [_cell(parameter, column) for column in COLUMNS]
    return [name, report.figures.shape(parameter.shape), report.elements(parameter.numel), *cells]


def _cell(parameter: ParameterRecord, column: Column) -> report.PageCell:
    text = cell(parameter, column)
    seen = [f"{sighting.dtype}: {_evidence(sighting)}" for sighting in parameter.cells.get(column, ())]
    hover = "\n".join([column, *(seen or [parameter.unseen.get(column, "not seen")])])
    return report.dtype_cell(text, cell(parameter, "storage") if text == "same" else text, hover)
