"""Which curves a run has, and what is marked on them.

Invariant: a step that was skipped, and a place where the run was gone on with, are marked on every curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zerodrift.report.figures import elements, significant, size
from zerodrift.report.markup import Markup, tag
from zerodrift.train.report.curves import Chart, Mark, Point, Series, chart, smoothing
from zerodrift.train.report.lines import RunLines


def held_out(lines: RunLines) -> list[Point]:
    """The losses of evaluations."""
    found = [line for line in lines if line["kind"] == "evaluation" and line["validation_loss"] is not None]
    return [(float(line["step"]), float(line["validation_loss"])) for line in found]


def resumes(lines: RunLines) -> list[Mapping[str, Any]]:
    """Where a run was gone on with."""
    return [line for line in lines if line["kind"] == "start" and line["step"] > 0]


def charts(lines: RunLines) -> Markup:
    """All of them, with what their marks mean."""
    marks = (*_skips(lines), *_resumes(lines))
    tokens = _tokens_of_a_step(lines)
    drawn = [chart(spec, marks, tokens) for spec in _specs(lines)]
    return tag("div", tag("div", drawn, class_="charts"), _legend(lines, marks))


def _specs(lines: RunLines) -> list[Chart]:
    def of(key: str, label: str, color: str, smooth: bool = False) -> Series:
        return Series(label, color, tuple(lines.steps(key)), smooth=smooth)

    held = Series("held out", "gradient", tuple(held_out(lines)), dots=True)
    loss = of("loss", "training", "storage", smooth=True)
    losses = (loss, held) if held.points else (loss,)
    norms, rates = of("grad_norm", "gradient norm", "master"), of("lr", "learning rate", "state")
    speed, memory = of("tokens_per_second", "throughput", "accumulate"), of("memory", "memory", "wire")
    perplexities = tuple(_perplexity(series) for series in losses)
    specs = [
        Chart("Loss", losses, _number),
        Chart("Perplexity", perplexities, _number, log=_spread(*perplexities) > 20),
        Chart("Gradient norm before clipping", (norms,), _number, log=_spread(norms) > 20),
        Chart("Learning rate", (rates,), _small, from_zero=True),
        Chart("Tokens per second", (speed,), _count, from_zero=True),
        Chart("Memory of rank 0", (memory,), lambda value: size(round(value)), from_zero=True, binary=True),
    ]
    scale = of("loss_scale", "loss scale", "buffers")
    if any(value != 1.0 for _, value in scale.points):
        specs.append(Chart("Loss scale", (scale,), _count, log=True))
    return specs


MOST = 1e6
"""A perplexity above which it says nothing."""


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < math.log(MOST) else math.inf


def _perplexity(series: Series) -> Series:
    found = tuple((x, perplexity(value)) for x, value in series.points)
    return Series(series.label, series.color, found, series.dots, series.smooth)


def _spread(*lines: Series) -> float:
    values = [value for series in lines for _, value in series.points if 0 < value < math.inf]
    return max(values) / min(values) if values else 1.0


def _tokens_of_a_step(lines: RunLines) -> float:
    """0 where no step was taken."""
    step, tokens = lines.last("step"), lines.last("tokens")
    return (tokens or 0.0) / step if step else 0.0


# --- marks --------------------------------------------------------------------------------------------


def _skips(lines: RunLines) -> list[Mark]:
    steps = sorted({step for step, skipped in lines.steps("skipped") if skipped})
    return [Mark(step, "skip", f"step {step:.0f} was skipped") for step in steps]


def _resumes(lines: RunLines) -> list[Mark]:
    found = []
    for line in resumes(lines):
        changed = ", ".join(change[0] for change in line.get("changed", ()))
        text = f"gone on with after step {line['step']}" + (f"; changed: {changed}" if changed else "")
        found.append(Mark(line["step"] + 0.5, "resume", text))
    return found


def _legend(lines: RunLines, marks: Sequence[Mark]) -> Markup:
    steps = len(lines.steps("loss"))
    kinds = {mark.kind for mark in marks}
    words: list[Markup] = []
    if steps > 1:
        words.append(
            tag("span", f"Losses are smoothed over {smoothing(steps)} steps; behind are all of them.")
        )
    if "resume" in kinds:
        words.append(tag("span", tag("i", class_="key resume"), " gone on with from a checkpoint"))
    if "skip" in kinds:
        words.append(tag("span", tag("i", class_="key skip"), " a skipped step"))
    return tag("p", words, class_="quiet marked") if words else Markup("")


# --- figures ------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    return significant(value) if abs(value) < 1000 else elements(round(value))


def _small(value: float) -> str:
    return f"{value:.3g}"


def _count(value: float) -> str:
    return elements(round(value)) if value >= 1 else significant(value)
