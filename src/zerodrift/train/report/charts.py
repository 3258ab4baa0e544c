"""The curves of a run as inline SVG: lines over steps, with axes, and marks for skipped steps and resumes.

Many points are drawn as few: each stretch of steps becomes its mean, and its lowest and highest a band around
it, so that no peak is lost. A value that is not a number leaves a gap. Equal points give equal markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zerodrift.report.figures import elements, significant, size
from zerodrift.report.markup import Markup, join, tag
from zerodrift.train.report.metrics import RunLines

Point = tuple[float, float]

WIDTH, HEIGHT = 420, 204
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 10, 38
_MOST = 240
"""Most stretches of a line."""
LARGEST_PERPLEXITY = 1e6
"""A perplexity above this says nothing."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    label: str
    color: str
    """A class of the page's style: `storage`, `gradient`."""
    points: tuple[Point, ...]
    dots: bool = False
    """Draw each of few points."""
    smooth: bool = False
    """Draw a running mean in front of the points."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines that share their axes."""

    title: str
    series: tuple[Series, ...]
    shown: Callable[[float], str]
    """Format of a value."""
    log: bool = False
    from_zero: bool = False
    binary: bool = False
    """Round values are powers of two."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An event at a place of the horizontal axis."""

    x: float
    kind: str
    """A class of the page's style: `skip`, `resume`."""
    text: str


# --- the charts of a run ----------------------------------------------------------------------------------


def held_out(lines: RunLines) -> list[Point]:
    """Return (step, loss) of the evaluations."""
    found = [line for line in lines.of_kind("evaluation") if line["validation_loss"] is not None]
    return [(float(line["step"]), float(line["validation_loss"])) for line in found]


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < math.log(LARGEST_PERPLEXITY) else math.inf


def charts(lines: RunLines) -> Markup:
    """Return all charts, and a legend of their marks."""
    marks = _marks(lines)
    step, tokens = lines.last("step"), lines.last("tokens")
    tokens_of_a_step = (tokens or 0.0) / step if step else 0.0
    drawn = [chart(spec, marks, tokens_of_a_step) for spec in _specs(lines)]
    return tag("div", tag("div", drawn, class_="charts"), _legend(lines, marks))


def _specs(lines: RunLines) -> list[Chart]:
    def of(key: str, label: str, color: str, smooth: bool = False) -> Series:
        return Series(label, color, tuple(lines.steps(key)), smooth=smooth)

    def number(value: float) -> str:
        return significant(value) if abs(value) < 1000 else elements(round(value))

    def count(value: float) -> str:
        return elements(round(value)) if value >= 1 else significant(value)

    held = Series("held out", "gradient", tuple(held_out(lines)), dots=True)
    loss = of("loss", "training", "storage", smooth=True)
    losses = (loss, held) if held.points else (loss,)
    perplexities = tuple(
        replace(series, points=tuple((x, perplexity(value)) for x, value in series.points))
        for series in losses
    )
    norms, rates = of("grad_norm", "gradient norm", "master"), of("lr", "learning rate", "state")
    speed, memory = of("tokens_per_second", "throughput", "accumulate"), of("memory", "memory", "wire")
    specs = [
        Chart("Loss", losses, number),
        Chart("Perplexity", perplexities, number, log=_spread(*perplexities) > 20),
        Chart("Gradient norm before clipping", (norms,), number, log=_spread(norms) > 20),
        Chart("Learning rate", (rates,), lambda value: f"{value:.3g}", from_zero=True),
        Chart("Tokens per second", (speed,), count, from_zero=True),
        Chart("Memory of rank 0", (memory,), lambda value: size(round(value)), from_zero=True, binary=True),
    ]
    scale = of("loss_scale", "loss scale", "buffers")
    if any(value != 1.0 for _, value in scale.points):
        specs.append(Chart("Loss scale", (scale,), count, log=True))
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


def _legend(lines: RunLines, marks: Sequence[Mark]) -> Markup:
    steps = len(lines.steps("loss"))
    kinds = {mark.kind for mark in marks}
    words: list[Markup] = []
    if steps > 1:
        text = f"Losses are smoothed over {smoothing_steps(steps)} steps; behind are all of them."
        words.append(tag("span", text))
    for kind, text in (("resume", " gone on with from a checkpoint"), ("skip", " a skipped step")):
        if kind in kinds:
            words.append(tag("span", tag("i", class_=f"key {kind}"), text))
    return tag("p", words, class_="quiet marked") if words else Markup("")


# --- one chart --------------------------------------------------------------------------------------------


def chart(spec: Chart, marks: Sequence[Mark] = (), tokens: float = 0.0) -> Markup:
    """Draw a chart with its title; `tokens` of a step add a second row below the steps."""
    lines = [
        [(x, y) for x, y in series.points if math.isfinite(y) and (y > 0 or not spec.log)]
        for series in spec.series
    ]
    flat = [point for line in lines for point in line]
    if not flat:
        return _figure(spec, tag("p", "nothing yet", class_="quiet"))
    steps, values = [x for x, _ in flat], [y for _, y in flat]
    first, last = min(steps), max(steps)
    ticks = _ticks(0.0 if spec.from_zero else min(values), max(values), spec)
    across = _Scale(first, last, _LEFT, WIDTH - _RIGHT, log=False)
    low, high = min(ticks[0], min(values)), max(ticks[-1], max(values))
    up = _Scale(low, high, HEIGHT - _BOTTOM, _TOP, spec.log)
    svg = tag(
        "svg",
        [_rule(tick, up, spec.shown) for tick in ticks],
        [_step(tick, across, tokens) for tick in step_ticks(first, last)],
        [_mark(mark, across) for mark in marks if first <= mark.x <= last],
        [_line(series, line, across, up) for series, line in zip(spec.series, lines, strict=True) if line],
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_="curve",
        role="img",
        aria_label=f"{spec.title}, last {spec.shown(values[-1])}",
    )
    return _figure(spec, svg)


def _figure(spec: Chart, drawing: Markup) -> Markup:
    labels = [
        tag("span", tag("i", class_=f"dot b-{series.color}"), f" {series.label}", class_="quiet label")
        for series in spec.series
        if len(spec.series) > 1
    ]
    last = next((series.points[-1][1] for series in spec.series if series.points), None)
    shown = tag("b", spec.shown(last)) if last is not None and math.isfinite(last) else ""
    return tag("figure", tag("figcaption", tag("span", spec.title, " ", shown), tag("span", labels)), drawing)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Neighbouring points drawn as one."""

    x: float
    mean: float
    low: float
    high: float


def stretches(points: Sequence[Point], most: int = _MOST) -> list[_Stretch]:
    """Divide points into at most `most` stretches of equal length."""
    count = max(1, math.ceil(len(points) / most))
    made = []
    for start in range(0, len(points), count):
        part = points[start : start + count]
        values = [value for _, value in part]
        middle = (part[0][0] + part[-1][0]) / 2
        made.append(_Stretch(middle, sum(values) / len(values), min(values), max(values)))
    return made


def _line(series: Series, points: Sequence[Point], across: _Scale, up: _Scale) -> Markup:
    def path(pairs: Sequence[Point], end: str = "", **attributes: str) -> Markup:
        drawn = "M" + "L".join(f"{_n(across(x))} {_n(up(y))}" for x, y in pairs) + end
        return tag("path", d=drawn, **attributes)

    if series.dots:
        dots = [
            tag("circle", tag("title", f"step {x:g}: {y:.6g}"), cx=_n(across(x)), cy=_n(up(y)), r="3")
            for x, y in points
        ]
        return tag("g", path(points, class_="thin"), dots, class_=f"s-{series.color}")
    few = stretches(points)
    behind: list[Markup] = []
    if len(few) < len(points):
        band = [(each.x, each.high) for each in few] + [(each.x, each.low) for each in reversed(few)]
        behind.append(path(band, "Z", class_="band"))
    line = [(each.x, each.mean) for each in few]
    if series.smooth and len(points) > 2:
        behind.append(path(line, class_="raw"))
        means = smooth_values([value for _, value in points], smoothing_steps(len(points)))
        smooth = stretches([(x, mean) for (x, _), mean in zip(points, means, strict=True)])
        line = [(each.x, each.mean) for each in smooth]
    x, y = line[-1]
    end = tag("circle", cx=_n(across(x)), cy=_n(up(y)), r="2.5")
    return tag("g", join(behind), path(line, class_="line"), end, class_=f"s-{series.color}")


def smoothing_steps(count: int) -> int:
    """Return the steps of a running mean: a twentieth of them."""
    return max(2, min(200, count // 20))


def smooth_values(values: Sequence[float], over: int) -> list[float]:
    """Return a mean that weighs near values more, before and after alike, so that it does not lag."""
    ahead, back = _decaying_means(values, over), _decaying_means(values[::-1], over)[::-1]
    return [(left + right) / 2 for left, right in zip(ahead, back, strict=True)]


def _decaying_means(values: Sequence[float], over: int) -> list[float]:
    keep = 1 - 1 / over
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight)
    return means


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


# --- axes ---------------------------------------------------------------------------------------------


def _rule(tick: float, up: _Scale, shown: Callable[[float], str]) -> Markup:
    y = _n(up(tick))
    rule = tag("line", x1=_n(_LEFT), x2=_n(WIDTH - _RIGHT), y1=y, y2=y, class_="grid")
    return join([rule, tag("text", shown(tick), x=_n(_LEFT - 8), y=_n(up(tick) + 4), class_="tick end")])


def _step(tick: float, across: _Scale, tokens: float) -> Markup:
    x = _n(across(tick))
    step = tag("text", f"{tick:,.0f}", x=x, y=_n(HEIGHT - 22), class_="tick middle")
    if not tokens:
        return step
    below = tag("text", elements(round(tick * tokens)), x=x, y=_n(HEIGHT - 8), class_="tick middle faint")
    return join([step, below])


def _mark(mark: Mark, across: _Scale) -> Markup:
    x, low = _n(across(mark.x)), HEIGHT - _BOTTOM
    high = _TOP if mark.kind == "resume" else low - 8
    return tag(
        "line", tag("title", mark.text), x1=x, x2=x, y1=_n(high), y2=_n(low), class_=f"mark {mark.kind}"
    )


def _ticks(low: float, high: float, spec: Chart) -> list[float]:
    if spec.log:
        return log_ticks(low, high)
    return binary_ticks(high) if spec.binary else even_ticks(low, high)


def even_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers around and between two values."""
    span = high - low or abs(high) or 1.0
    rough = span / most
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    count = max(1, math.ceil(high / step - 1e-9) - first)
    return [(first + number) * step for number in range(count + 1)]


def binary_ticks(high: float) -> list[float]:
    """Return multiples of a power of two, from zero."""
    step = 2.0 ** max(0, math.ceil(math.log2(max(high, 1.0) / 4)))
    return [number * step for number in range(math.ceil(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten; over several powers these alone."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    before = [tick for tick in ticks if tick < low * 0.999]
    after = [tick for tick in ticks if tick > high * 1.001]
    return [*before[-1:], *inside, *after[:1]]


def step_ticks(low: float, high: float) -> list[float]:
    """Return whole steps between the first and the last."""
    ticks = [tick for tick in even_ticks(low, high, 6) if low <= tick <= high and tick == round(tick)]
    return ticks or [low]
