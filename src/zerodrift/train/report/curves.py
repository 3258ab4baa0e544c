"""Curves as SVG: lines over steps, with axes that a person can read off.

Many points are drawn as few: each stretch of steps becomes its mean, and its lowest and highest a band
around it, so that no peak is lost. What is not a number leaves a gap.

Invariant: pure; equal points give equal markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerodrift.report.figures import elements
from zerodrift.report.markup import Markup, join, tag

Point = tuple[float, float]

WIDTH, HEIGHT = 420, 204
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 10, 38
_MOST = 240
"""Stretches that a line is drawn from."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    label: str
    color: str
    """A class of the page's style: `storage`, `gradient`."""
    points: tuple[Point, ...]
    dots: bool = False
    """Few points that stand for themselves."""
    smooth: bool = False
    """A running mean over the points, which are drawn behind it."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines that share their axes."""

    title: str
    series: tuple[Series, ...]
    shown: Callable[[float], str]
    """How a value is written."""
    log: bool = False
    from_zero: bool = False
    binary: bool = False
    """Whether round values are powers of two: bytes."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a place of the horizontal axis."""

    x: float
    kind: str
    """A class of the page's style: `skip`, `resume`."""
    text: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to the drawing."""

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


def chart(spec: Chart, marks: Sequence[Mark] = (), tokens: float = 0.0) -> Markup:
    """The drawing with its title; says so where there is nothing to draw. `tokens` are those of a step, for a
    second row below the steps."""
    lines = [[point for point in series.points if _drawable(point, spec.log)] for series in spec.series]
    flat = [point for line in lines for point in line]
    if not flat:
        return _figure(spec, tag("p", "nothing yet", class_="quiet"))
    steps, values = [x for x, _ in flat], [y for _, y in flat]
    ticks = _ticks(0.0 if spec.from_zero else min(values), max(values), spec)
    low, high = min(ticks[0], min(values)), max(ticks[-1], max(values))
    across = _Scale(min(steps), max(steps), _LEFT, WIDTH - _RIGHT, log=False)
    up = _Scale(low, high, HEIGHT - _BOTTOM, _TOP, spec.log)
    drawn = [_line(series, line, across, up) for series, line in zip(spec.series, lines, strict=True) if line]
    svg = tag(
        "svg",
        [_row(tick, up, spec.shown) for tick in ticks],
        [_column(tick, across, tokens) for tick in step_ticks(min(steps), max(steps))],
        [_mark(mark, across) for mark in marks if min(steps) <= mark.x <= max(steps)],
        drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_="curve",
        role="img",
        aria_label=f"{spec.title}, last {spec.shown(values[-1])}",
    )
    return _figure(spec, svg)


def _ticks(low: float, high: float, spec: Chart) -> list[float]:
    if spec.log:
        return log_ticks(low, high)
    return binary_ticks(high) if spec.binary else even_ticks(low, high)


def _drawable(point: Point, log: bool) -> bool:
    return math.isfinite(point[1]) and (point[1] > 0 or not log)


def _figure(spec: Chart, drawing: Markup) -> Markup:
    labels = [
        tag("span", tag("i", class_=f"dot b-{series.color}"), f" {series.label}", class_="quiet label")
        for series in spec.series
        if len(spec.series) > 1
    ]
    last = next((series.points[-1][1] for series in spec.series if series.points), None)
    shown = tag("b", spec.shown(last)) if last is not None and math.isfinite(last) else ""
    return tag("figure", tag("figcaption", tag("span", spec.title, " ", shown), tag("span", labels)), drawing)


# --- lines --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some neighbouring points as one."""

    x: float
    mean: float
    low: float
    high: float


def stretches(points: Sequence[Point], most: int = _MOST) -> list[_Stretch]:
    """At most so many, of equally many points."""
    size = max(1, math.ceil(len(points) / most))
    stretched = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part]
        middle = (part[0][0] + part[-1][0]) / 2
        stretched.append(_Stretch(middle, sum(values) / len(values), min(values), max(values)))
    return stretched


def _line(series: Series, points: Sequence[Point], across: _Scale, up: _Scale) -> Markup:
    if series.dots:
        path = _path([(across(x), up(y)) for x, y in points])
        dots = [
            tag("circle", tag("title", f"step {x:g}: {y:.6g}"), cx=_n(across(x)), cy=_n(up(y)), r="3")
            for x, y in points
        ]
        return tag("g", tag("path", d=path, class_="thin"), dots, class_=f"s-{series.color}")
    stretched = stretches(points)
    band: Markup = Markup("")
    if len(stretched) < len(points):
        upper = [(across(stretch.x), up(stretch.high)) for stretch in stretched]
        lower = [(across(stretch.x), up(stretch.low)) for stretch in reversed(stretched)]
        band = tag("path", d=_path([*upper, *lower]) + "Z", class_="band")
    path = _path([(across(stretch.x), up(stretch.mean)) for stretch in stretched])
    last = stretched[-1]
    end = tag("circle", cx=_n(across(last.x)), cy=_n(up(last.mean)), r="2.5")
    if series.smooth and len(points) > 2:
        means = smoothed([value for _, value in points], smoothing(len(points)))
        behind = tag("path", d=path, class_="raw")
        few = stretches([(x, mean) for (x, _), mean in zip(points, means, strict=True)])
        path = _path([(across(stretch.x), up(stretch.mean)) for stretch in few])
        end = tag("circle", cx=_n(across(few[-1].x)), cy=_n(up(few[-1].mean)), r="2.5")
        band = join([band, behind])
    return tag("g", band, tag("path", d=path, class_="line"), end, class_=f"s-{series.color}")


def smoothing(count: int) -> int:
    """How many steps a running mean is over: a twentieth of them."""
    return max(2, min(200, count // 20))


def smoothed(values: Sequence[float], over: int) -> list[float]:
    """A mean that weighs what is near more, before and after alike: it runs neither ahead nor behind."""
    ahead, back = _forgetting(values, over), _forgetting(values[::-1], over)[::-1]
    return [(left + right) / 2 for left, right in zip(ahead, back, strict=True)]


def _forgetting(values: Sequence[float], over: int) -> list[float]:
    keep = 1 - 1 / over
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight)
    return means


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


# --- axes ---------------------------------------------------------------------------------------------


def _row(tick: float, up: _Scale, shown: Callable[[float], str]) -> Markup:
    y = _n(up(tick))
    rule = tag("line", x1=_n(_LEFT), x2=_n(WIDTH - _RIGHT), y1=y, y2=y, class_="grid")
    return join([rule, tag("text", shown(tick), x=_n(_LEFT - 8), y=_n(up(tick) + 4), class_="tick end")])


def _column(tick: float, across: _Scale, tokens: float) -> Markup:
    x = _n(across(tick))
    step = tag("text", f"{tick:,.0f}", x=x, y=_n(HEIGHT - 22), class_="tick middle")
    if not tokens:
        return step
    below = tag("text", elements(round(tick * tokens)), x=x, y=_n(HEIGHT - 8), class_="tick middle faint")
    return join([step, below])


def _mark(mark: Mark, across: _Scale) -> Markup:
    x, low = _n(across(mark.x)), HEIGHT - _BOTTOM
    high = _TOP if mark.kind == "resume" else low - 8
    text = tag("title", mark.text)
    return tag("line", text, x1=x, x2=x, y1=_n(high), y2=_n(low), class_=f"mark {mark.kind}")


def even_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers around and between two values."""
    span = high - low or abs(high) or 1.0
    rough = span / most
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    count = max(1, math.ceil(high / step - 1e-9) - first)
    return [(first + number) * step for number in range(count + 1)]


def binary_ticks(high: float) -> list[float]:
    """Multiples of a power of two, from zero."""
    step = 2.0 ** max(0, math.ceil(math.log2(max(high, 1.0) / 4)))
    return [number * step for number in range(math.ceil(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten; powers alone where that is much."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    before = [tick for tick in ticks if tick < low * 0.999]
    after = [tick for tick in ticks if tick > high * 1.001]
    return [*before[-1:], *inside, *after[:1]]


def step_ticks(low: float, high: float) -> list[float]:
    """Whole steps between the first and the last."""
    ticks = [tick for tick in even_ticks(low, high, 6) if low <= tick <= high and tick == round(tick)]
    return ticks or [low]
