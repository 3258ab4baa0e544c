"""The page of a run: its state, curves, samples, precision, data, environment and plan.

The page is made from `metrics.jsonl` and the plan at any time in a run. It is one file without references to
others, which can be sent and kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerodrift.pipeline import timeline
from zerodrift.plan import Plan, cost
from zerodrift.report import (
    BlockRow,
    Chart,
    ChartLegend,
    ErrorBanner,
    FactList,
    Mark,
    PageCell,
    PageHead,
    PageSection,
    PageTable,
    Paragraph,
    Point,
    Preformatted,
    Series,
    chart,
    dtype_cell,
    elements,
    group_rows,
    page,
    plan_sections,
    significant,
    size,
    smoothing_steps,
    summary,
    table_section,
)
from zerodrift.train.job import Job
from zerodrift.train.report.display import clock
from zerodrift.train.report.metrics import RunLines

LARGEST_PERPLEXITY = 1e6
"""A larger perplexity is shown as above this one."""
SHOWN_CELLS, SHOWN_DIGESTS, SHOWN_SAMPLES, SHOWN_SKIPS = 6, 8, 6, 50
"""Entries on the page: cells and places of each audit, and the last digests, samples and skips."""


def run_page(job: Job, plan: Plan, lines: RunLines, steps: int) -> str:
    plan = plan.noted(lines.last_of_kind("precision").get("notes", ()))
    state, words = _state(lines, steps)
    first, more = job.data.paths[0], len(job.data.paths) - 1
    source = f"{plan.source} on {plan.mesh}, {first}" + (f" and {more} more" if more else "")
    error, data = lines.last_of_kind("end").get("error"), lines.last_of_kind("start").get("data", ())
    alarm = [ErrorBanner(f"The run {words}.", str(error))] if error else []
    sections = [
        PageSection("", "", [*alarm, _tiles(plan, lines)]),
        PageSection("Curves", "curves", charts(lines)),
        _samples(lines),
        _resumes(lines),
        _skips(lines),
        PageSection("Data", "data", [FactList(data)] if data else ()),
        PageSection("Precision, declared and observed", "precision", _precision(lines)),
        _rounding(lines),
        _traces(lines),
        _digests(lines),
        _environment(lines),
        PageSection("Plan", "plan", [FactList(summary.facts(plan))]),
        *plan_sections(plan, cost(plan), group_rows(plan), timeline(plan)),
    ]
    head = PageHead(job.run.folder, "zerodrift run", state, words, source)
    return page(f"zerodrift run: {job.run.folder}", head, sections, plan.digest)


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


def _tiles(plan: Plan, lines: RunLines) -> FactList:
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
    return FactList(tiles, "tiles")


def _utilisation(plan: Plan, lines: RunLines, speed: float) -> tuple[str, str, str]:
    """Return a tile with the model FLOPs utilisation (MFU), or with FLOP/s and the reason for no MFU."""
    counted = lines.last_of_kind("flops")
    per_token, uncounted = counted.get("per_token"), counted.get("uncounted")
    if uncounted:
        return "MFU", "-", f"not counted: torch's formula fails for {', '.join(uncounted)}"
    if not per_token:
        return "MFU", "-", "not counted: the first step was not watched, or is compiled or in a pipeline"
    reached = per_token * speed / plan.mesh.world
    device = str(lines.last_of_kind("start").get("device", ""))
    if not device:
        return "computed", readable(reached), "per rank, of the model; no share: a CPU states no peak"
    counts: Counter[str] = Counter()
    for row in plan.rows:
        counts[row.columns.cells()["compute"]] += row.numel
    dtype = max(counts, key=lambda dtype: counts[dtype]) if counts else "fp32"
    if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tf32"  # torch may compute fp32 products in it
    most = peak(device, dtype)
    if most is None:
        return "computed", readable(reached), f"per GPU, of the model; the peak of {device} is not known here"
    return "MFU", f"{reached / most:.1%}", f"of {readable(most)}, dense {dtype} on {device}"


PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 80}),
    ("GH200", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("H200", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("H100 PCIe", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ("H100 NVL", {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60}),
    ("H100", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("A100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("A40", {"bf16": 150, "fp16": 150, "tf32": 75, "fp32": 37.4}),
    ("A10", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    ("L40S", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    ("L4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    ("V100", {"fp16": 125, "fp32": 15.7}),
    ("T4", {"fp16": 65, "fp32": 8.1}),
    ("RTX 4090", {"bf16": 165, "fp16": 165, "tf32": 83, "fp32": 83}),
    ("RTX 3090", {"bf16": 71, "fp16": 71, "tf32": 36, "fp32": 36}),
    ("MI300X", {"bf16": 1307, "fp16": 1307, "fp32": 163}),
    ("MI250X", {"bf16": 383, "fp16": 383, "fp32": 48}),
)
"""Words of a device's name -> TFLOP/s of dense products by dtype; the first match counts."""

_SLOWER = ("Laptop", "Max Q", "D")
"""Words in the names of slower variants."""


def peak(device: str, dtype: str) -> float | None:
    """Return the stated FLOP/s of a device; None if unknown."""
    words = f" {device.replace('-', ' ')} "
    if any(f" {word} " in words for word in _SLOWER):
        return None
    known: dict[str, float] = next((peaks for name, peaks in PEAKS if f" {name} " in words), {})
    return known[dtype] * 1e12 if dtype in known else None


def readable(flops: float) -> str:
    """`12.3 TFLOP/s`."""
    if flops <= 0:
        return "0 FLOP/s"
    power = min(5, max(0, int(math.log10(flops)) // 3))
    return f"{flops / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}FLOP/s"


def _skips(lines: RunLines) -> PageSection:
    rows = [
        (f"{line['step']}", ", ".join(line["parameters"]) or "-", line["places"])
        for line in lines.of_kind("skip")[-SHOWN_SKIPS:]
    ]
    return table_section(
        "Skipped steps", "skips", ("step", "first bad gradients", "rank, micro-batch, loss"), rows
    )


def _precision(lines: RunLines) -> list[Paragraph | PageTable]:
    every = lines.of_kind("precision")
    if not every:
        return [Paragraph("Not compared: no step was taken, or `run.check_precision` is false.")]
    # A run that was resumed with another plan or on other ranks has several tables, the last one first.
    shown = [line for at, line in enumerate(every) if not at or line["cells"] != every[at - 1]["cells"]]
    ends = [f"{line['step'] - 1}" for line in shown[1:]]
    steps = [f"Steps {line['step']} to {end}. " for line, end in zip(shown, [*ends, "the end"], strict=True)]
    blocks = [_observed(line, words if ends else "") for line, words in zip(shown, steps, strict=True)]
    return [block for pair in reversed(blocks) for block in pair]


def _observed(line: Mapping[str, Any], steps: str) -> list[Paragraph | PageTable]:
    """Return the table of one observed step. `steps` names the steps that it is valid for."""
    rows, before = [], ""
    for column, declared, seen, parameters, numel, verdict in line["cells"]:
        mark = {"not seen": "quiet", "DIFFERENT": "wrong"}.get(verdict, "ok")
        amount = PageCell(f"{parameters:,} tensors, {elements(numel)}", "quiet")
        name = PageCell(column if column != before else "", is_head=True)
        rows.append((name, dtype_cell(declared), dtype_cell(seen), PageCell(verdict, mark), amount))
        before = column
    logits = ", ".join(line.get("logits", ())) or "not seen"
    note = (
        f"{steps}Seen in step {line['step']} on every rank, in tensors and collectives, not in a config. "
        f"Outputs of the model: {logits}. A column is not seen if nothing is sent or cut in it."
    )
    heads = ("column", "declared", "observed", "", "parameters")
    return [Paragraph(note), PageTable(heads, rows, "precision")]


def _rounding(lines: RunLines) -> PageSection:
    """Return the estimated cost of rounding at each audited step."""
    audits = lines.of_kind("audit")
    rows = []
    if audits:
        rows.append(("all together", "", *(_shown(line["rms"]) for line in audits)))
    for part, names in (("cells", 2), ("places", 3)):  # names in front of the value of an entry
        keys = dict.fromkeys(tuple(entry[:names]) for line in audits for entry in line[part][:SHOWN_CELLS])
        tables = [{tuple(entry[:names]): entry[names] for entry in line[part]} for line in audits]
        for key in keys:
            rows.append((" ".join(key[:-1]), key[-1], *(_shown(table.get(key)) for table in tables)))
    steps = [f"step {line['step']}" for line in audits]
    words = "Estimated root mean square of the change of a log-probability; not replayed."
    table = PageTable(("parameter or place", "cell", *steps), rows, "rows", steps)
    return PageSection("What rounding costs", "rounding", [Paragraph(words), table] if rows else ())


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _samples(lines: RunLines) -> PageSection:
    shown = []
    for line in lines.of_kind("sample")[-SHOWN_SAMPLES:]:
        prompt = f"{line['prompt']}\n" if line.get("chat") else f"{line['prompt']}"
        shown.append(Preformatted(f"{line['text']}", prompt, f"step {line['step']}"))
    return PageSection("Samples", "samples", [BlockRow(shown, "samples")] if shown else ())


def _environment(lines: RunLines) -> PageSection:
    here: Mapping[str, str] = lines.last_of_kind("start").get("environment", {})
    return PageSection("Environment", "environment", [FactList([*here.items()])] if here else ())


def _resumes(lines: RunLines) -> PageSection:
    rows: list[list[str]] = []
    for line in (line for line in lines.of_kind("start") if line["step"] > 0):
        where = (line["step"], line.get("from", ""))
        for number, change in enumerate(line.get("changed") or [("nothing changed", "", "", "")]):
            rows.append(list(map(str, (*(("", "") if number else where), *change))))
    heads = ("after step", "from", "what", "was", "is", "which holds")
    return table_section("Resumed", "resumed", heads, rows)


def _digests(lines: RunLines) -> PageSection:
    """Return the last digests of the state."""
    found = [line for line in lines if line["kind"] in ("digest", "checkpoint") and line.get("digest")]
    rows = [(str(line["step"]), str(line["digest"])) for line in found[-SHOWN_DIGESTS:]]
    words = "Digests of weights, moments and counters. Equal digests are equal bits, on any number of ranks."
    return table_section("Digests", "digests", ("step", "digest"), rows, words)


def _traces(lines: RunLines) -> PageSection:
    facts = [(f"steps {line['first']} to {line['step']}", line["folder"]) for line in lines.of_kind("trace")]
    words = Paragraph("One of each rank, for Perfetto (ui.perfetto.dev) or chrome://tracing.")
    return PageSection("Traces", "traces", [words, FactList(facts)] if facts else ())


def held_out(lines: RunLines) -> list[Point]:
    """Return (step, loss) of the evaluations."""
    found = [line for line in lines.of_kind("evaluation") if line["validation_loss"] is not None]
    return [(float(line["step"]), float(line["validation_loss"])) for line in found]


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < math.log(LARGEST_PERPLEXITY) else math.inf


def charts(lines: RunLines) -> list[BlockRow | ChartLegend]:
    marks = _marks(lines)
    step, tokens = lines.last("step"), lines.last("tokens")
    tokens_of_a_step = (tokens or 0.0) / step if step else 0.0
    drawn = BlockRow([chart(spec, marks, tokens_of_a_step) for spec in _specs(lines)], "charts")
    steps = len(lines.steps("loss"))
    words = f"Losses are smoothed over {smoothing_steps(steps)} steps; behind are all of them."
    meanings = (("resume", "resumed from a checkpoint"), ("skip", "a skipped step"))
    kinds = [pair for pair in meanings if pair[0] in {mark.kind for mark in marks}]
    legend = [ChartLegend(words if steps > 1 else "", kinds)] if steps > 1 or kinds else []
    return [drawn, *legend]


def _number(value: float) -> str:
    return significant(value) if abs(value) < 1000 else elements(round(value))


def _count(value: float) -> str:
    return elements(round(value)) if value >= 1 else significant(value)


def _specs(lines: RunLines) -> list[Chart]:
    def losses(shown: Sequence[Point], evaluated: Sequence[Point]) -> list[Series]:
        dots = [f"step {x:g}: {y:.6g}" for x, y in evaluated]
        held = [Series("held out", "gradient", evaluated, dots=dots)] if evaluated else []
        return [Series("training", "storage", shown, smooth=True), *held]

    def perplexities(points: Sequence[Point]) -> list[Point]:
        return [(x, perplexity(value)) for x, value in points]

    trained, evaluated = lines.steps("loss"), held_out(lines)
    confused = losses(perplexities(trained), perplexities(evaluated))
    norms, rates = lines.steps("grad_norm"), lines.steps("lr")
    speed, memory = lines.steps("tokens_per_second"), lines.steps("memory")
    norm, used = Series("gradient norm", "master", norms), Series("memory", "wire", memory)
    specs = [
        Chart("Loss", losses(trained, evaluated), _number),
        Chart("Perplexity", confused, _number, log=_spread(*confused) > 20),
        Chart("Gradient norm before clipping", [norm], _number, log=_spread(norm) > 20),
        Chart("Learning rate", [Series("learning rate", "state", rates)], "{:.3g}".format, from_zero=True),
        Chart("Tokens per second", [Series("throughput", "accumulate", speed)], _count, from_zero=True),
        Chart("Memory of rank 0", [used], lambda value: size(round(value)), from_zero=True, binary=True),
    ]
    scale = Series("loss scale", "buffers", lines.steps("loss_scale"))
    if any(value != 1.0 for _, value in scale.points):
        specs.append(Chart("Loss scale", [scale], _count, log=True))
    return specs


def _spread(*lines: Series) -> float:
    values = [value for series in lines for _, value in series.points if 0 < value < math.inf]
    return max(values) / min(values) if values else 1.0


def _marks(lines: RunLines) -> list[Mark]:
    steps = sorted({step for step, skipped in lines.steps("skipped") if skipped})
    marks = [Mark(step, "skip", f"step {step:.0f} was skipped") for step in steps]
    for line in (line for line in lines.of_kind("start") if line["step"] > 0):
        changed = ", ".join(change[0] for change in line.get("changed", ()))
        text = f"resumed after step {line['step']}" + (f"; changed: {changed}" if changed else "")
        marks.append(Mark(line["step"] + 0.5, "resume", text))
    return marks
