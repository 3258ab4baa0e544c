"""The page of a run: how it stands, its curves, what its tensors really were, and the plan below.

Made of the lines of `metrics.jsonl` and the plan, so it can be made of any run at any time. One file that
refers to nothing: it can be sent and kept.

Invariant: every figure on it is in the metrics or in the plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from zerodrift.pipeline.schedules import timeline
from zerodrift.plan.cost import cost
from zerodrift.plan.table import Plan
from zerodrift.report import summary
from zerodrift.report.figures import elements, significant, size
from zerodrift.report.markup import Markup, join, tag
from zerodrift.report.page import breaking, document, plan_sections, section, tint
from zerodrift.report.rows import grouped
from zerodrift.train.loop.job import Job
from zerodrift.train.report import circumstances
from zerodrift.train.report.charts import MOST, charts, held_out, perplexity
from zerodrift.train.report.display import clock
from zerodrift.train.report.lines import RunLines
from zerodrift.train.tools.flops import dtype_of_products, peak, readable


def run_page(job: Job, plan: Plan, lines: RunLines, steps: int) -> str:
    """The whole page."""
    plan = plan.noted(_found(lines).get("notes", ()))
    body = [
        _head(job, plan, lines, steps),
        _banner(lines, steps),
        _tiles(plan, lines),
        section("Curves", charts(lines), id="curves"),
        circumstances.samples(lines),
        circumstances.gone_on_with(lines),
        _skips(lines),
        circumstances.data(lines),
        section("Precision, declared and observed", _precision(lines), id="precision"),
        _rounding(lines),
        circumstances.traces(lines),
        circumstances.digests(lines),
        circumstances.environment(lines),
        section("Plan", circumstances.facts_list(summary.facts(plan)), id="plan"),
        *plan_sections(plan, cost(plan), grouped(plan), timeline(plan)),
    ]
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return document(f"zerodrift run: {job.run.folder}", body, style)


# --- head ---------------------------------------------------------------------------------------------


def _head(job: Job, plan: Plan, lines: RunLines, steps: int) -> Markup:
    kind, words = _state(lines, steps)
    return tag(
        "header",
        tag("p", "zerodrift run", class_="kicker"),
        tag("h1", breaking(job.run.folder), " ", tag("span", words, class_=f"state {kind}")),
        tag("p", breaking(f"{plan.source} on {plan.mesh}, {_named(job.data.paths)}"), class_="quiet"),
    )


def _named(paths: str | tuple[str, ...]) -> str:
    names = (paths,) if isinstance(paths, str) else paths
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _end(lines: RunLines) -> Mapping[str, Any]:
    """How it ended; empty while it runs."""
    return next((line for line in reversed(lines) if line["kind"] == "end"), {})


def _state(lines: RunLines, steps: int) -> tuple[str, str]:
    """A class of the style, and words."""
    end, done = _end(lines), round(lines.last("step") or 0)
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
    """Why it failed, before anything else."""
    error = _end(lines).get("error")
    if not error:
        return Markup("")
    heading = tag("b", f"The run failed after step {_end(lines)['step']} of {steps}.")
    return tag("div", heading, tag("pre", str(error)), class_="banner", role="alert")


def _tiles(plan: Plan, lines: RunLines) -> Markup:
    losses = lines.steps("loss")
    speeds = [value for _, value in lines.steps("tokens_per_second")]
    tiles: list[tuple[str, str, str]] = []
    if losses:
        first, last = losses[0][1], losses[-1][1]
        tiles.append(("loss", f"{last:.4f}", f"from {first:.4f} at step {losses[0][0]:g}"))
    held = held_out(lines)
    if held:
        best, step = min(
            ((value, step) for step, value in held if math.isfinite(value)), default=(math.nan, 0)
        )
        words = f"best {best:.4f} at step {step:g}" if step else "never a number"
        tiles.append(("validation loss", f"{held[-1][1]:.4f}", words))
    if (held or losses) and math.isfinite((held or losses)[-1][1]):
        value = perplexity((held or losses)[-1][1])
        shown = significant(value) if math.isfinite(value) else f"above {elements(int(MOST))}"
        tiles.append(("perplexity", shown, "of the held-out data" if held else "of the last step"))
    tokens = round(lines.last("tokens") or 0)
    if tokens:
        tiles.append(("tokens", elements(tokens), f"{lines.last('epoch') or 0:.2f} epochs"))
    if speeds:
        middle = sorted(speeds)[len(speeds) // 2]
        tiles.append(("tokens per second", elements(round(middle)), "median of the steps, with padding"))
        tiles.append(_utilisation(plan, lines, middle))
    seconds = lines.last("seconds")
    if seconds is not None:
        tiles.append(("training time", clock(seconds), "without evaluation and saving"))
    memory = lines.last("memory")
    if memory:
        most = max(value for _, value in lines.steps("memory"))
        tiles.append(("memory of rank 0", size(round(most)), "most, with the program itself"))
    parts = [
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="quiet"))
        for name, value, note in tiles
    ]
    return tag("dl", parts, class_="tiles")


def _utilisation(plan: Plan, lines: RunLines, speed: float) -> tuple[str, str, str]:
    """Model FLOPs utilisation with the peak it is of; without one what is computed per second, and why."""
    counted = next((line for line in reversed(lines) if line["kind"] == "flops"), {})
    per_token = counted.get("per_token")
    if not per_token:
        return "MFU", "-", "not counted: the first step was not watched, or is compiled or in a pipeline"
    reached = per_token * speed / plan.mesh.world
    device = str(circumstances.last_start(lines).get("device", ""))
    if not device:
        return "computed", readable(reached), "per rank, of the model; no share: a CPU states no peak"
    dtype = _products(plan)
    most = peak(device, dtype)
    if most is None:
        return "computed", readable(reached), f"per GPU, of the model; the peak of {device} is not known here"
    return "MFU", f"{reached / most:.1%}", f"of {readable(most)}, dense {dtype} on {device}"


def _products(plan: Plan) -> str:
    """The dtype that most parameters compute in."""
    counts: Counter[str] = Counter()
    for row in plan.rows:
        counts[row.columns.cells()["compute"]] += row.numel
    return dtype_of_products(max(counts, key=lambda dtype: counts[dtype])) if counts else "fp32"


# --- precision ----------------------------------------------------------------------------------------


def _found(lines: RunLines) -> Mapping[str, Any]:
    """What was observed in the first step; empty where nobody looked."""
    return next((line for line in reversed(lines) if line["kind"] == "precision"), {})


def _precision(lines: RunLines) -> Markup:
    last = _found(lines)
    if not last:
        return tag("p", "Not compared: no step was taken, or `run.check_precision` is false.", class_="quiet")
    heads = [tag("th", head, scope="col") for head in ("column", "declared", "observed", "", "parameters")]
    rows = []
    before = ""
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
    """What dtypes were estimated to cost while it trained; nothing where nobody looked."""
    looks = [line for line in lines if line["kind"] == "audit"]
    if not looks:
        return Markup("")
    names = list(dict.fromkeys((name, cell) for line in looks for name, cell, _ in line["cells"][:_LOOKED]))
    places = list(
        dict.fromkeys(
            (module, at, what) for line in looks for module, at, what, _ in line["places"][:_LOOKED]
        )
    )
    rows = [_rounded("all together", "", [line["rms"] for line in looks])]
    for name, cell in names:
        values = [{(n, c): rms for n, c, rms in line["cells"]}.get((name, cell)) for line in looks]
        rows.append(_rounded(name, cell, values))
    for module, at, what in places:
        values = [
            {(m, a, w): rms for m, a, w, rms in line["places"]}.get((module, at, what)) for line in looks
        ]
        rows.append(_rounded(f"{module} {at}", what, values))
    steps = [tag("th", f"step {line['step']}", scope="col", class_="number") for line in looks]
    head = tag("thead", tag("tr", tag("th", "parameter or place"), tag("th", "cell"), steps))
    words = "Estimated, as the root mean square of what it changes in a log-probability; not replayed."
    table = tag("div", tag("table", head, tag("tbody", rows), class_="rows"), class_="scroll")
    return section("What rounding costs", tag("p", words, class_="quiet"), table, id="rounding")


_LOOKED = 6
"""Cells and places of each look that are shown."""


def _rounded(name: str, cell: str, values: Sequence[float | None]) -> Markup:
    shown = [tag("td", "" if value is None else f"{value:.2g}", class_="number") for value in values]
    return tag("tr", tag("td", breaking(name), class_="name"), tag("td", cell, class_="cell"), shown)


def _skips(lines: RunLines) -> Markup:
    skipped = [line for line in lines if line["kind"] == "skip"]
    if not skipped:
        return Markup("")
    rows = [
        tag(
            "tr",
            tag("td", f"{line['step']}"),
            tag("td", ", ".join(line["parameters"]) or "-"),
            tag("td", line["places"]),
        )
        for line in skipped[-50:]
    ]
    heads = ("step", "first bad gradients", "rank, micro-batch, loss")
    return section("Skipped steps", circumstances.table(heads, rows), id="skips")
