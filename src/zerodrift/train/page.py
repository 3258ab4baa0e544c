"""The page of a run: how it stands, its curves, what its tensors really were, and the plan below.

Made of the lines of `metrics.jsonl` and the plan, so it can be made of any run at any time. One file that
refers to nothing: it can be sent and kept.

Invariant: every figure on it is in the metrics or in the plan.
"""

from __future__ import annotations

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
from zerodrift.train.curves import Chart, Point, Series, chart
from zerodrift.train.display import clock
from zerodrift.train.job import Job

Lines = Sequence[dict[str, Any]]
"""Those of `metrics.jsonl`."""


def run_page(job: Job, plan: Plan, lines: Lines, steps: int) -> str:
    """The whole page."""
    plan = plan.noted(_found(lines).get("notes", ()))
    body = [
        _head(job, plan, lines, steps),
        _tiles(lines, steps),
        section("Curves", tag("div", _charts(lines), class_="charts"), id="curves"),
        section("Precision, declared and observed", _precision(lines), id="precision"),
        _rounding(lines),
        _skips(lines),
        section("Plan", _facts(plan), id="plan"),
        *plan_sections(plan, cost(plan), grouped(plan), timeline(plan)),
    ]
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return document(f"zerodrift run: {job.run.folder}", body, style)


# --- head ---------------------------------------------------------------------------------------------


def _head(job: Job, plan: Plan, lines: Lines, steps: int) -> Markup:
    return tag(
        "header",
        tag("p", "zerodrift run", class_="kicker"),
        tag("h1", job.run.folder, " ", tag("span", *_state(lines, steps))),
        tag("p", f"{plan.source} on {plan.mesh}, {_named(job.data.train)}", class_="quiet"),
    )


def _named(paths: str | tuple[str, ...]) -> str:
    names = (paths,) if isinstance(paths, str) else paths
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _state(lines: Lines, steps: int) -> tuple[str]:
    ends = [line for line in lines if line["kind"] == "end"]
    done = _last(lines, "step", "step") or 0
    if not ends:
        return (f"running, step {done} of {steps}",)
    if ends[-1].get("error"):
        return (f"failed after step {ends[-1]['step']}: {ends[-1]['error']}",)
    if ends[-1].get("stopped"):
        return (f"stopped after step {ends[-1]['step']} of {steps}",)
    return (f"done, {done} steps",)


def _last(lines: Lines, kind: str, key: str) -> Any:
    return next(
        (line[key] for line in reversed(lines) if line["kind"] == kind and line.get(key) is not None), None
    )


def _tiles(lines: Lines, steps: int) -> Markup:
    losses = _points(lines, "step", "loss")
    speeds = [value for _, value in _points(lines, "step", "tokens_per_second")]
    tiles: list[tuple[str, str, str]] = []
    if losses:
        first, last = losses[0][1], losses[-1][1]
        tiles.append(("loss", f"{last:.4f}", f"from {first:.4f} at step {losses[0][0]:g}"))
    held = _points(lines, "evaluation", "validation_loss")
    if held:
        best = min(value for _, value in held)
        tiles.append(("validation loss", f"{held[-1][1]:.4f}", f"best {best:.4f}"))
    tokens = _last(lines, "step", "tokens")
    if tokens:
        tiles.append(("tokens", elements(tokens), f"{_last(lines, 'step', 'epoch'):.2f} epochs"))
    if speeds:
        middle = sorted(speeds)[len(speeds) // 2]
        tiles.append(("tokens per second", elements(round(middle)), "median of the steps"))
    seconds = _last(lines, "step", "seconds")
    if seconds is not None:
        tiles.append(("training time", clock(seconds), "without evaluation and saving"))
    memory = _last(lines, "step", "memory")
    if memory:
        most = max(value for _, value in _points(lines, "step", "memory"))
        tiles.append(("memory of rank 0", size(round(most)), "most, with the program itself"))
    parts = [
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="quiet"))
        for name, value, note in tiles
    ]
    return tag("dl", parts, class_="tiles")


# --- curves -------------------------------------------------------------------------------------------


def _points(lines: Lines, kind: str, key: str) -> list[Point]:
    return [
        (float(line["step"]), float(line[key]))
        for line in lines
        if line["kind"] == kind and line.get(key) is not None
    ]


def _charts(lines: Lines) -> list[Markup]:
    def of(key: str, label: str, color: str) -> Series:
        return Series(label, color, tuple(_points(lines, "step", key)))

    held = Series("held out", "gradient", tuple(_points(lines, "evaluation", "validation_loss")), dots=True)
    loss = of("loss", "training", "storage")
    losses = (loss, held) if held.points else (loss,)
    norms, rates = of("grad_norm", "gradient norm", "master"), of("lr", "learning rate", "state")
    speed, memory = of("tokens_per_second", "throughput", "accumulate"), of("memory", "memory", "wire")
    charts = [
        Chart("Loss", losses, _number),
        Chart("Gradient norm before clipping", (norms,), _number, log=_spread(norms) > 20),
        Chart("Learning rate", (rates,), _small, from_zero=True),
        Chart("Tokens per second", (speed,), _count, from_zero=True),
        Chart("Memory of rank 0", (memory,), lambda value: size(round(value)), from_zero=True, binary=True),
    ]
    scale = of("loss_scale", "loss scale", "buffers")
    if any(value != 1.0 for _, value in scale.points):
        charts.append(Chart("Loss scale", (scale,), _count, log=True))
    return [chart(spec) for spec in charts]


def _spread(series: Series) -> float:
    values = [value for _, value in series.points if value > 0]
    return max(values) / min(values) if values else 1.0


def _number(value: float) -> str:
    return significant(value) if abs(value) < 1000 else elements(round(value))


def _small(value: float) -> str:
    return f"{value:.3g}"


def _count(value: float) -> str:
    return elements(round(value)) if value >= 1 else significant(value)


# --- precision ----------------------------------------------------------------------------------------


def _found(lines: Lines) -> Mapping[str, Any]:
    """What was observed in the first step; empty where nobody looked."""
    return next((line for line in reversed(lines) if line["kind"] == "precision"), {})


def _precision(lines: Lines) -> Markup:
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
    return join([tag("p", note, class_="quiet"), table])


def _rounding(lines: Lines) -> Markup:
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


def _skips(lines: Lines) -> Markup:
    skipped = [line for line in lines if line["kind"] == "skip"]
    if not skipped:
        return Markup("")
    rows = [
        tag(
            "tr",
            tag("td", f"{line['step']}", class_="number"),
            tag("td", ", ".join(line["parameters"]) or "-"),
            tag("td", line["places"]),
        )
        for line in skipped[-50:]
    ]
    heads = [
        tag("th", head, scope="col") for head in ("step", "first bad gradients", "rank, micro-batch, loss")
    ]
    table = tag("table", tag("thead", tag("tr", heads)), tag("tbody", rows), class_="listing")
    return section("Skipped steps", table, id="skips")


def _facts(plan: Plan) -> Markup:
    facts = [tag("div", tag("dt", label), tag("dd", value)) for label, value in summary.facts(plan)]
    return tag("dl", facts, class_="facts")
