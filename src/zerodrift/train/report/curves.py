"""The charts of a run: loss, perplexity, gradient norm, learning rate, throughput, memory, loss scale.

`report.charts` draws them. Skipped steps and resumes are marks on every chart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zerodrift.report import (
    BlockRow,
    Chart,
    ChartLegend,
    Mark,
    Point,
    Series,
    chart,
    elements,
    significant,
    size,
    smoothing_steps,
)
from zerodrift.train.report.metrics import RunLines

LARGEST_PERPLEXITY = 1e6
"""A perplexity above this says nothing."""


def held_out(lines: RunLines) -> list[Point]:
    """Return (step, loss) of the evaluations."""
    found = [line for line in lines.of_kind("evaluation") if line["validation_loss"] is not None]
    return [(float(line["step"]), float(line["validation_loss"])) for line in found]


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < math.log(LARGEST_PERPLEXITY) else math.inf


def charts(lines: RunLines) -> list[BlockRow | ChartLegend]:
    """Return all charts, and a legend of their marks."""
    marks = _marks(lines)
    step, tokens = lines.last("step"), lines.last("tokens")
    tokens_of_a_step = (tokens or 0.0) / step if step else 0.0
    drawn = BlockRow([chart(spec, marks, tokens_of_a_step) for spec in _specs(lines)], "charts")
    steps = len(lines.steps("loss"))
    words = f"Losses are smoothed over {smoothing_steps(steps)} steps; behind are all of them."
    meanings = (("resume", "gone on with from a checkpoint"), ("skip", "a skipped step"))
    kinds = [pair for pair in meanings if pair[0] in {mark.kind for mark in marks}]
    legend = [ChartLegend(words if steps > 1 else "", kinds)] if steps > 1 or kinds else []
    return [drawn, *legend]


def _number(value: float) -> str:
    return significant(value) if abs(value) < 1000 else elements(round(value))


def _count(value: float) -> str:
    return elements(round(value)) if value >= 1 else significant(value)


def _bytes(value: float) -> str:
    return size(round(value))


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
    norm = Series("gradient norm", "master", norms)
    specs = [
        Chart("Loss", losses(trained, evaluated), _number),
        Chart("Perplexity", confused, _number, log=_spread(*confused) > 20),
        Chart("Gradient norm before clipping", [norm], _number, log=_spread(norm) > 20),
        Chart("Learning rate", [Series("learning rate", "state", rates)], "{:.3g}".format, from_zero=True),
        Chart("Tokens per second", [Series("throughput", "accumulate", speed)], _count, from_zero=True),
        Chart("Memory of rank 0", [Series("memory", "wire", memory)], _bytes, from_zero=True, binary=True),
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
        text = f"gone on with after step {line['step']}" + (f"; changed: {changed}" if changed else "")
        marks.append(Mark(line["step"] + 0.5, "resume", text))
    return marks
