"""What a run was made with and of, for its page: data, samples, environment, resumes, digests.

Invariant: what is here was written down by the run when it happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from zerodrift.report.markup import Markup, tag
from zerodrift.report.page import section
from zerodrift.train.report.charts import resumes
from zerodrift.train.report.lines import RunLines


def last_start(lines: RunLines) -> Mapping[str, Any]:
    """Of the run as it was begun or gone on with last; empty where it never was."""
    return next((line for line in reversed(lines) if line["kind"] == "start"), {})


def data(lines: RunLines) -> Markup:
    """What was read."""
    facts = last_start(lines).get("data", ())
    return section("Data", facts_list(facts), id="data") if facts else Markup("")


def samples(lines: RunLines) -> Markup:
    """What the model wrote while it was trained."""
    found = [line for line in lines if line["kind"] == "sample"]
    shown = [
        tag("figure", tag("figcaption", f"step {line['step']}"), _written(line), class_="sample")
        for line in found[-6:]
    ]
    return section("Samples", tag("div", shown, class_="samples"), id="samples") if shown else Markup("")


def _written(line: Mapping[str, Any]) -> Markup:
    return tag("pre", tag("b", str(line.get("prompt", ""))), str(line.get("text", "")))


def environment(lines: RunLines) -> Markup:
    """Where it ran, with which command and versions."""
    here: Mapping[str, str] = last_start(lines).get("environment", {})
    if not here:
        return Markup("")
    first = [(key, here[key]) for key in ("command", "folder", "commit", "host", "started") if key in here]
    rest = [(key, value) for key, value in here.items() if key not in dict(first)]
    return section("Environment", facts_list(first), facts_list(rest), id="environment")


def gone_on_with(lines: RunLines) -> Markup:
    """Each time, and what was other than before."""
    found = resumes(lines)
    if not found:
        return Markup("")
    heads = ("after step", "from", "what", "was", "is", "which holds")
    rows: list[Markup] = []
    for line in found:
        where = (str(line["step"]), line.get("from", ""))
        changes = line.get("changed") or [("nothing changed", "", "", "")]
        for number, change in enumerate(changes):
            cells = (*(("", "") if number else where), *change)
            rows.append(tag("tr", [tag("td", str(cell)) for cell in cells]))
    return section("Resumed", table(heads, rows), id="resumed")


def digests(lines: RunLines) -> Markup:
    """Of the state, where it was taken: two runs that have the same computed the same bits."""
    found = [line for line in lines if line["kind"] in ("digest", "checkpoint") and line.get("digest")]
    rows = [
        tag("tr", tag("td", str(line["step"])), tag("td", tag("code", str(line["digest"]))))
        for line in found[-_DIGESTS:]
    ]
    if not rows:
        return Markup("")
    words = "Of weights, moments and counters. Equal digests are equal bits, on any number of ranks."
    return section("Digests", tag("p", words, class_="quiet"), table(("step", "digest"), rows), id="digests")


_DIGESTS = 8
"""The last ones are shown; the metrics have all."""


def traces(lines: RunLines) -> Markup:
    """Where steps lie that were recorded."""
    found = [line for line in lines if line["kind"] == "trace"]
    if not found:
        return Markup("")
    facts = [(f"steps {line['first']} to {line['step']}", line["folder"]) for line in found]
    words = "Of each rank, for Perfetto (ui.perfetto.dev) or chrome://tracing."
    return section("Traces", tag("p", words, class_="quiet"), facts_list(facts), id="traces")


def facts_list(facts: Iterable[tuple[str, str]]) -> Markup:
    return tag(
        "dl",
        [tag("div", tag("dt", str(label)), tag("dd", str(value))) for label, value in facts],
        class_="facts",
    )


def table(heads: Iterable[str], rows: Iterable[Markup]) -> Markup:
    """One that scrolls by itself where the screen is narrow."""
    head = tag("thead", tag("tr", [tag("th", text, scope="col") for text in heads]))
    return tag("div", tag("table", head, tag("tbody", list(rows)), class_="listing"), class_="scroll")
