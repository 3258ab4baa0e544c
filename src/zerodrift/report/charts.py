"""Line charts as inline SVG: the geometry of lines, axes and marks, which the template `blocks.html` draws.

A line of many points is drawn through the means of stretches of points. A band from the lowest to the highest
value of each stretch keeps every peak visible. Values that are not finite are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerodrift.report.figures import elements

Point = tuple[float, float]

WIDTH, HEIGHT = 420, 204
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 20, 10, 38
_MOST = 240  # most stretches of a line


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    label: str
    color: str  # a colour of the style sheet: `storage`, `gradient`
    points: Sequence[Point]
    dots: Sequence[str] = ()  # text of each point, for few points that are drawn as dots
    smooth: bool = False  # draw a running mean in front of the points


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines that share their axes."""

    title: str
    series: Sequence[Series]
    shown: Callable[[float], str]  # format of a value
    log: bool = False
    from_zero: bool = False
    binary: bool = False  # round values are powers of two


@dataclass(frozen=True, slots=True)
class Mark:
    """An event at a place of the horizontal axis."""

    x: float
    kind: str  # a class of the page's style: `skip`, `resume`
    text: str


@dataclass(frozen=True, slots=True)
class DrawnLine:
    color: str
    paths: list[tuple[str, str]]  # (class of the style sheet, path of SVG)
    dots: Sequence[tuple[float, float, float, str]]  # (x, y, radius, text on hover)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart in SVG units, as `show` takes it."""

    title: str
    last: str  # last value of the first line that has one, or `""`
    labels: list[tuple[str, str]]
    rules: Sequence[tuple[float, str]] = ()  # (y, text) of the vertical axis
    steps: Sequence[tuple[float, str, str]] = ()  # (x, text, text below) of the horizontal axis
    marks: Sequence[tuple[float, float, float, str, str]] = ()  # (x, top, bottom, kind, text)
    lines: Sequence[DrawnLine] = ()
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT


@dataclass(frozen=True, slots=True)
class ChartLegend:
    """Words about charts, and the kinds of marks with their meanings."""

    words: str
    kinds: Sequence[tuple[str, str]]


def chart(spec: Chart, marks: Sequence[Mark] = (), tokens: float = 0.0) -> Drawing:
    """Draw a chart. With the number of `tokens` of a step, a second row of labels counts tokens."""
    labels = [(each.label, each.color) for each in spec.series] if len(spec.series) > 1 else []
    last = next((series.points[-1][1] for series in spec.series if series.points), math.nan)
    shown = spec.shown(last) if math.isfinite(last) else ""
    lowest = 0.0 if spec.log else -math.inf
    drawn = [
        (series, [number for number, (_, y) in enumerate(series.points) if lowest < y < math.inf])
        for series in spec.series
    ]
    flat = [series.points[number] for series, numbers in drawn for number in numbers]
    if not flat:
        return Drawing(spec.title, shown, labels)
    steps, values = [x for x, _ in flat], [y for _, y in flat]
    first, end = min(steps), max(steps)
    low, high = 0.0 if spec.from_zero else min(values), max(values)
    if spec.log:
        ticks = log_ticks(low, high)
    else:
        ticks = binary_ticks(high) if spec.binary else even_ticks(low, high)
    across = _scale(first, end, _LEFT, WIDTH - _RIGHT, log=False)
    up = _scale(min(ticks[0], *values), max(ticks[-1], *values), HEIGHT - _BOTTOM, _TOP, spec.log)
    bottom = HEIGHT - _BOTTOM
    return Drawing(
        spec.title,
        shown,
        labels,
        rules=[(up(tick), spec.shown(tick)) for tick in ticks],
        steps=[
            (across(x), f"{x:,.0f}", elements(round(x * tokens)) if tokens else "")
            for x in step_ticks(first, end)
        ],
        marks=[
            (across(mark.x), _TOP if mark.kind == "resume" else bottom - 8, bottom, mark.kind, mark.text)
            for mark in marks
            if first <= mark.x <= end
        ],
        lines=[_line(series, numbers, across, up) for series, numbers in drawn if numbers],
    )


def _scale(low: float, high: float, start: float, end: float, log: bool) -> Callable[[float], float]:
    """Return a map of values from `low` on to the drawing, to a tenth of a unit."""
    measure = math.log10 if log else float
    bottom, top = measure(low), measure(high)

    def place(value: float) -> float:
        share = (measure(max(value, low)) - bottom) / (top - bottom) if high > low else 0.5
        return round(start + share * (end - start), 1)

    return place


def stretches(points: Sequence[Point]) -> list[tuple[float, float, float, float]]:
    """Divide points into at most `_MOST` stretches of equal length: (x, mean, lowest, highest) of each."""
    count = max(1, math.ceil(len(points) / _MOST))
    made = []
    for start in range(0, len(points), count):
        part = points[start : start + count]
        values = [value for _, value in part]
        made.append(((part[0][0] + part[-1][0]) / 2, sum(values) / len(values), min(values), max(values)))
    return made


def _line(
    series: Series, numbers: Sequence[int], across: Callable[[float], float], up: Callable[[float], float]
) -> DrawnLine:
    """Draw the points of a line that have these numbers."""
    points = [series.points[number] for number in numbers]

    def path(pairs: Sequence[Point]) -> str:
        return "M" + "L".join(f"{across(x):g} {up(y):g}" for x, y in pairs)

    if series.dots:
        dots = [(across(x), up(y), 3, series.dots[n]) for n, (x, y) in zip(numbers, points, strict=True)]
        return DrawnLine(series.color, [("thin", path(points))], dots)
    few, paths = stretches(points), []
    if len(few) < len(points):
        band = [(x, high) for x, _, _, high in few] + [(x, low) for x, _, low, _ in reversed(few)]
        paths.append(("band", path(band) + "Z"))
    line = [(x, mean) for x, mean, _, _ in few]
    if series.smooth and len(points) > 2:
        paths.append(("raw", path(line)))
        means = smooth_values([value for _, value in points], smoothing_steps(len(points)))
        smooth = stretches([(x, mean) for (x, _), mean in zip(points, means, strict=True)])
        line = [(x, mean) for x, mean, _, _ in smooth]
    x, y = line[-1]
    return DrawnLine(series.color, [*paths, ("line", path(line))], [(across(x), up(y), 2.5, "")])


def smoothing_steps(count: int) -> int:
    """Return the steps of a running mean: a twentieth of them."""
    return max(2, min(200, count // 20))


def smooth_values(values: Sequence[float], over: int) -> list[float]:
    """Return the mean of two decaying means, forward and backward, so that it does not lag."""
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
    """Return 1, 2 and 5 times powers of ten, or only powers of ten if there are more than two."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    before = [tick for tick in ticks if tick < low * 0.999]
    after = [tick for tick in ticks if tick > high * 1.001]
    return ticks[max(0, len(before) - 1) : len(ticks) - len(after) + 1]


def step_ticks(low: float, high: float) -> list[float]:
    """Return whole steps between the first and the last."""
    ticks = [tick for tick in even_ticks(low, high, 6) if low <= tick <= high and tick == round(tick)]
    return ticks or [low]
