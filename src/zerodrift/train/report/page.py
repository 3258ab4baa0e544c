"""The page of a run: its state, curves, samples, precision, data, environment and plan.

It is made of the lines of `metrics.jsonl` and the plan alone, so any run has one at any time. One file that
refers to nothing, to be sent and kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from zerodrift.pipeline.schedules import timeline
from zerodrift.plan.cost import cost
from zerodrift.plan.table import Plan
from zerodrift.report import summary
from zerodrift.report.figures import elements, significant, size
from zerodrift.report.markup import Markup, join, tag
from zerodrift.report.page import breaking, document, plan_sections, section, tint
from zerodrift.report.rows import group_rows
from zerodrift.train.job import Job
from zerodrift.train.report.charts import LARGEST_PERPLEXITY, charts, held_out, perplexity
from zerodrift.train.report.display import clock
from zerodrift.train.report.metrics import RunLines
from zerodrift.train.tools.flops import dtype_of_products, peak, readable

SHOWN_CELLS, SHOWN_DIGESTS, SHOWN_SAMPLES, SHOWN_SKIPS = 6, 8, 6, 50
"""Entries on the page: cells and places of each audit, and the last digests, samples and skips."""


def run_page(job: Job, plan: Plan, lines: RunLines, steps: int) -> str:
    """Return the page as HTML."""
    plan = plan.noted(lines.last_of_kind("precision").get("notes", ()))
    body = [
        _head(job, plan, lines, steps),
        _banner(lines, steps),
        _tiles(plan, lines),
        section("Curves", charts(lines), id="curves"),
        _samples(lines),
        _resumes(lines),
        _skips(lines),
        _data(lines),
        section("Precision, declared and observed", _precision(lines), id="precision"),
        _rounding(lines),
        _traces(lines),
        _digests(lines),
        _environment(lines),
        section("Plan", _facts(summary.facts(plan)), id="plan"),
        *plan_sections(plan, cost(plan), group_rows(plan), timeline(plan)),
    ]
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return document(f"zerodrift run: {job.run.folder}", body, style)


def _facts(facts: Iterable[tuple[str, str]]) -> Markup:
    rows = [tag("div", tag("dt", str(label)), tag("dd", str(value))) for label, value in facts]
    return tag("dl", rows, class_="facts")


def _table(heads: Iterable[str], rows: Iterable[Markup]) -> Markup:
    """Return a table that scrolls by itself on a narrow screen."""
    head = tag("thead", tag("tr", [tag("th", text, scope="col") for text in heads]))
    return tag("div", tag("table", head, tag("tbody", list(rows)), class_="listing"), class_="scroll")


def _row(cells: Iterable[str]) -> Markup:
    return tag("tr", [tag("td", cell) for cell in cells])


# --- state --------------------------------------------------------------------------------------------


def _head(job: Job, plan: Plan, lines: RunLines, steps: int) -> Markup:
    state, words = _state(lines, steps)
    first, more = job.data.paths[0], len(job.data.paths) - 1
    source = f"{plan.source} on {plan.mesh}, {first}" + (f" and {more} more" if more else "")
    return tag(
        "header",
        tag("p", "zerodrift run", class_="kicker"),
        tag("h1", breaking(job.run.folder), " ", tag("span", words, class_=f"state {state}")),
        tag("p", breaking(source), class_="quiet"),
    )


def _state(lines: RunLines, steps: int) -> tuple[str, str]:
    """Return a class of the style, and words."""
    end, done = lines.last_of_kind("end"), round(lines.last("step") or 0)
    if not end:
        return "running", f"running, step {done} of {steps}"
    if end.get("error"):
        return "failed", f"failed after step {end['step']} of {steps}"
    if end.get("stopped"):
        return "stopped", f"stopped after step {end['step']} of {steps}"
    if end.get("early"):
        return "done", f"done after step {end['step']} of {steps}: {end['early']}"
    return "done", f"done, {done} steps"


def _banner(lines: RunLines, steps: int) -> Markup:
    """Return the error of a failed run."""
    end = lines.last_of_kind("end")
    if not end.get("error"):
        return Markup("")
    heading = tag("b", f"The run failed after step {end['step']} of {steps}.")
    return tag("div", heading, tag("pre", str(end["error"])), class_="banner", role="alert")


def _tiles(plan: Plan, lines: RunLines) -> Markup:
    losses, held = lines.steps("loss"), held_out(lines)
    tiles: list[tuple[str, str, str]] = []
    if losses:
        first, last = losses[0][1], losses[-1][1]
        tiles.append(("loss", f"{last:.4f}", f"from {first:.4f} at step {losses[0][0]:g}"))
    if held:
        numbers = [(value, step) for step, value in held if math.isfinite(value)]
        best, step = min(numbers, default=(math.nan, 0))
        words = f"best {best:.4f} at step {step:g}" if step else "never a number"
        tiles.append(("validation loss", f"{held[-1][1]:.4f}", words))
    if (held or losses) and math.isfinite((held or losses)[-1][1]):
        value = perplexity((held or losses)[-1][1])
        shown = significant(value) if math.isfinite(value) else f"above {elements(int(LARGEST_PERPLEXITY))}"
        tiles.append(("perplexity", shown, "of the held-out data" if held else "of the last step"))
    if tokens := round(lines.last("tokens") or 0):
        tiles.append(("tokens", elements(tokens), f"{lines.last('epoch') or 0:.2f} epochs"))
    if speeds := sorted(value for _, value in lines.steps("tokens_per_second")):
        middle = speeds[len(speeds) // 2]
        tiles.append(("tokens per second", elements(round(middle)), "median of the steps, with padding"))
        tiles.append(_utilisation(plan, lines, middle))
    if (seconds := lines.last("seconds")) is not None:
        tiles.append(("training time", clock(seconds), "without evaluation and saving"))
    if lines.last("memory"):
        most = max(value for _, value in lines.steps("memory"))
        tiles.append(("memory of rank 0", size(round(most)), "most, with the program itself"))
    parts = [
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="quiet"))
        for name, value, note in tiles
    ]
    return tag("dl", parts, class_="tiles")


def _utilisation(plan: Plan, lines: RunLines, speed: float) -> tuple[str, str, str]:
    """Return model FLOPs utilisation and its peak, or FLOP/s and why there is no share."""
    per_token = lines.last_of_kind("flops").get("per_token")
    if not per_token:
        return "MFU", "-", "not counted: the first step was not watched, or is compiled or in a pipeline"
    reached = per_token * speed / plan.mesh.world
    device = str(lines.last_of_kind("start").get("device", ""))
    if not device:
        return "computed", readable(reached), "per rank, of the model; no share: a CPU states no peak"
    counts: Counter[str] = Counter()
    for row in plan.rows:
        counts[row.columns.cells()["compute"]] += row.numel
    dtype = dtype_of_products(max(counts, key=lambda dtype: counts[dtype])) if counts else "fp32"
    most = peak(device, dtype)
    if most is None:
        return "computed", readable(reached), f"per GPU, of the model; the peak of {device} is not known here"
    return "MFU", f"{reached / most:.1%}", f"of {readable(most)}, dense {dtype} on {device}"


def _skips(lines: RunLines) -> Markup:
    rows = [
        _row((f"{line['step']}", ", ".join(line["parameters"]) or "-", line["places"]))
        for line in lines.of_kind("skip")[-SHOWN_SKIPS:]
    ]
    heads = ("step", "first bad gradients", "rank, micro-batch, loss")
    return section("Skipped steps", _table(heads, rows), id="skips") if rows else Markup("")


# --- precision ----------------------------------------------------------------------------------------


def _precision(lines: RunLines) -> Markup:
    last = lines.last_of_kind("precision")
    if not last:
        return tag("p", "Not compared: no step was taken, or `run.check_precision` is false.", class_="quiet")
    heads = [tag("th", head, scope="col") for head in ("column", "declared", "observed", "", "parameters")]
    rows, before = [], ""
    for column, declared, seen, parameters, numel, verdict in last["cells"]:
        mark = {"not seen": "quiet", "DIFFERENT": "wrong"}.get(verdict, "ok")
        rows.append(
            tag(
                "tr",
                tag("th", column if column != before else "", scope="row"),
                tag("td", declared, class_=f"cell {tint(declared)}".strip()),
                tag("td", seen, class_=f"cell {tint(seen)}".strip()),
                tag("td", verdict, class_=mark),
                tag("td", f"{parameters:,} tensors, {elements(numel)}", class_="quiet"),
            )
        )
        before = column
    logits = ", ".join(last.get("logits", ())) or "not seen"
    note = (
        f"Seen in step {last['step']} on every rank, in tensors and collectives, not in a config. Outputs of "
        f"the model: {logits}. What is not sent, or not cut, has nothing to see."
    )
    table = tag("table", tag("thead", tag("tr", heads)), tag("tbody", rows), class_="precision")
    return join([tag("p", note, class_="quiet"), tag("div", table, class_="scroll")])


def _rounding(lines: RunLines) -> Markup:
    """Return the estimated cost of rounding at each audited step."""
    audits = lines.of_kind("audit")
    if not audits:
        return Markup("")

    def rows_of(part: str, names: int) -> list[Markup]:
        """Return a row for each cell or place, which has `names` entries in front of its value."""
        keys = dict.fromkeys(tuple(e[:names]) for line in audits for e in line[part][:SHOWN_CELLS])
        tables = [{tuple(entry[:names]): entry[names] for entry in line[part]} for line in audits]
        return [
            _rounding_row(" ".join(key[:-1]), key[-1], [table.get(key) for table in tables]) for key in keys
        ]

    rows = [_rounding_row("all together", "", [line["rms"] for line in audits])]
    rows += [*rows_of("cells", 2), *rows_of("places", 3)]
    steps = [tag("th", f"step {line['step']}", scope="col", class_="number") for line in audits]
    head = tag("thead", tag("tr", tag("th", "parameter or place"), tag("th", "cell"), steps))
    words = "Estimated, as the root mean square of what it changes in a log-probability; not replayed."
    table = tag("div", tag("table", head, tag("tbody", rows), class_="rows"), class_="scroll")
    return section("What rounding costs", tag("p", words, class_="quiet"), table, id="rounding")


def _rounding_row(name: str, cell: str, values: Sequence[float | None]) -> Markup:
    shown = [tag("td", "" if value is None else f"{value:.2g}", class_="number") for value in values]
    return tag("tr", tag("td", breaking(name), class_="name"), tag("td", cell, class_="cell"), shown)


# --- provenance ---------------------------------------------------------------------------------------


def _data(lines: RunLines) -> Markup:
    facts = lines.last_of_kind("start").get("data", ())
    return section("Data", _facts(facts), id="data") if facts else Markup("")


def _samples(lines: RunLines) -> Markup:
    def written(line: Mapping[str, Any]) -> Markup:
        return tag("pre", tag("b", str(line.get("prompt", ""))), str(line.get("text", "")))

    shown = [
        tag("figure", tag("figcaption", f"step {line['step']}"), written(line), class_="sample")
        for line in lines.of_kind("sample")[-SHOWN_SAMPLES:]
    ]
    return section("Samples", tag("div", shown, class_="samples"), id="samples") if shown else Markup("")


def _environment(lines: RunLines) -> Markup:
    here: Mapping[str, str] = lines.last_of_kind("start").get("environment", {})
    if not here:
        return Markup("")
    first = [(key, here[key]) for key in ("command", "folder", "commit", "host", "started") if key in here]
    rest = [(key, value) for key, value in here.items() if key not in dict(first)]
    return section("Environment", _facts(first), _facts(rest), id="environment")


def _resumes(lines: RunLines) -> Markup:
    """Return each resume with its differences."""
    rows: list[Markup] = []
    for line in (line for line in lines.of_kind("start") if line["step"] > 0):
        where = (str(line["step"]), line.get("from", ""))
        for number, change in enumerate(line.get("changed") or [("nothing changed", "", "", "")]):
            rows.append(_row(map(str, (*(("", "") if number else where), *change))))
    heads = ("after step", "from", "what", "was", "is", "which holds")
    return section("Resumed", _table(heads, rows), id="resumed") if rows else Markup("")


def _digests(lines: RunLines) -> Markup:
    """Return the last digests of the state; the metrics have all."""
    found = [line for line in lines if line["kind"] in ("digest", "checkpoint") and line.get("digest")]
    rows = [
        tag("tr", tag("td", str(line["step"])), tag("td", tag("code", str(line["digest"]))))
        for line in found[-SHOWN_DIGESTS:]
    ]
    if not rows:
        return Markup("")
    words = "Of weights, moments and counters. Equal digests are equal bits, on any number of ranks."
    return section("Digests", tag("p", words, class_="quiet"), _table(("step", "digest"), rows), id="digests")


def _traces(lines: RunLines) -> Markup:
    found = lines.of_kind("trace")
    if not found:
        return Markup("")
    facts = [(f"steps {line['first']} to {line['step']}", line["folder"]) for line in found]
    words = "Of each rank, for Perfetto (ui.perfetto.dev) or chrome://tracing."
    return section("Traces", tag("p", words, class_="quiet"), _facts(facts), id="traces")
