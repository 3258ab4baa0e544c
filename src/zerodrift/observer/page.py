"""What was seen of a run, as one HTML page that needs nothing else.

A cell says on hover what showed it; every parameter is a line. The words are those of `text`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zerodrift.observer.finding import RunFinding
from zerodrift.observer.grouping import cell, groups
from zerodrift.observer.seen import COLUMNS, Column, SeenModel, SeenParameter, SeenProcess
from zerodrift.observer.text import facts, named
from zerodrift.report import figures
from zerodrift.report.markup import Markup, join, tag
from zerodrift.report.page import breaking, document, heads, section, tint


def run_page(
    processes: Sequence[SeenProcess], findings: Sequence[RunFinding], notes: Iterable[str], command: str
) -> str:
    first = processes[0]
    pairs = [("command", command), *facts(processes)]
    head = tag(
        "header",
        tag("h1", "zerodrift check"),
        tag("dl", [tag("div", tag("dt", label), tag("dd", value)) for label, value in pairs], class_="facts"),
    )
    trained = [p.name for model in first.models for p in model.parameters if p.trained]
    told = [*notes, *first.notes]
    body = [
        head,
        tag("ul", [tag("li", note) for note in told], class_="notes") if told else Markup(""),
        section("Findings", _findings(findings, trained), id="findings"),
        *(
            section(_title(model), _table(model), id=f"model-{number}")
            for number, model in enumerate(first.models)
        ),
    ]
    return document(f"zerodrift check: {command}", body, _STYLE)


def _title(model: SeenModel) -> str:
    return " in ".join([model.name, *reversed(model.wrappers)])


def _findings(findings: Sequence[RunFinding], trained: Sequence[str]) -> Markup:
    if not findings:
        return tag("p", "None.")
    return tag(
        "dl",
        [
            tag(
                "div",
                tag("dt", finding.kind, tag("div", finding.column or "", class_="quiet")),
                tag(
                    "dd",
                    tag("div", breaking(named(finding, trained))),
                    tag("div", " ".join(filter(None, (finding.line, finding.what)))),
                    tag("div", finding.do, class_="quiet"),
                ),
            )
            for finding in findings
        ],
        class_="findings",
    )


_STYLE = """
dl.findings > div { display: grid; grid-template-columns: 11rem 1fr; padding: .6rem 0;
  border-top: 1px solid var(--line, #e2e4e8); }
dl.findings dt { font-weight: 600; }
dl.findings dd { margin: 0; max-width: 46rem; }
@media (max-width: 40rem) { dl.findings > div { display: block; } }
"""


def _table(model: SeenModel) -> Markup:
    head = tag("thead", tag("tr", heads(("parameter", "shape", "elements", *COLUMNS))))
    lines = [_line(parameter) for group in groups(model) for parameter in group.parameters]
    return tag("div", tag("table", head, tag("tbody", lines), class_="rows"), class_="scroll")


def _line(parameter: SeenParameter) -> Markup:
    badge = "" if parameter.trained else tag("span", "frozen", class_="badge")
    also = [tag("div", "= ", breaking(name), class_="quiet") for name in parameter.also]
    layout = [tag("div", parameter.layout, class_="quiet")] if parameter.layout else []
    return tag(
        "tr",
        tag("td", join([breaking(parameter.name), " ", badge, also, layout]), class_="name"),
        tag("td", figures.shape(parameter.shape), class_="number"),
        tag("td", figures.elements(parameter.numel), class_="number"),
        [_cell(parameter, column) for column in COLUMNS],
    )


def _cell(parameter: SeenParameter, column: Column) -> Markup:
    words = cell(parameter, column)
    seen = [
        f"{sighting.what}: {sighting.by}"
        + (f" in {sighting.module}" if sighting.module else "")
        + (f", {sighting.line}" if sighting.line else "")
        for sighting in parameter.cells.get(column, ())
    ]
    label = "\n".join([column, *(seen or [parameter.unseen.get(column, "not seen")])])
    dtype = cell(parameter, "storage") if words == "same" else words
    return tag("td", words, class_=f"cell {tint(dtype)}".strip(), title=label)
