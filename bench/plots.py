"""Bars and lines as SVG, for pages: text with a ground of its own, light or dark as the reader has it.

The figures are chosen in `benchmarks.py`.

Invariant: the same figures make the same file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, NAMES, LENGTH, LINE, EDGE = 760, 280, 380, 22, 18
"""Pixels: of a picture, of the names of bars, of the longest bar, of a line of text, around it all."""
STYLE = """\
text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
.ground{fill:#fff;stroke:#d1d9e0}.text{fill:#1f2328}.quiet{fill:#59636e}.title{fill:#1f2328;font-weight:600}
.c0{fill:#0969da;stroke:#0969da}.c1{fill:#8c959f;stroke:#8c959f}.c2{fill:#bc4c00;stroke:#bc4c00}
.rule{stroke:#d1d9e0}.limit{stroke:#cf222e;stroke-dasharray:4 3}.bad{fill:#cf222e}
@media (prefers-color-scheme:dark){
.ground{fill:#0d1117;stroke:#3d444d}.text{fill:#f0f6fc}.quiet{fill:#9198a1}.title{fill:#f0f6fc}
.c0{fill:#4493f8;stroke:#4493f8}.c1{fill:#656c76;stroke:#656c76}.c2{fill:#db6d28;stroke:#db6d28}
.rule{stroke:#3d444d}.limit{stroke:#f85149}.bad{fill:#f85149}}"""


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    text: str
    """The value as text."""
    ours: bool


@dataclass(frozen=True)
class Bars:
    """A panel: the quantity, one bar per value, and limits."""

    title: str
    bars: tuple[Bar, ...]
    limits: tuple[tuple[float, str], ...] = ()
    """(value, label)"""


@dataclass(frozen=True)
class Line:
    name: str
    points: tuple[tuple[float, float], ...]


def bars(title: str, panels: Iterable[Bars]) -> str:
    parts, y = [], EDGE + 2 * LINE
    for panel in panels:
        longest = max([bar.value for bar in panel.bars] + [value for value, _ in panel.limits])
        parts.append(_text(EDGE, y, panel.title, "title"))
        top = y + LINE // 2
        for bar in panel.bars:
            y += LINE
            length = max(1.0, LENGTH * bar.value / longest)
            parts.append(_text(EDGE + NAMES - 8, y, bar.name, "text", "end"))
            parts.append(
                f'<rect x="{EDGE + NAMES}" y="{y - 12}" width="{length:.1f}" height="16" rx="2" '
                f'class="c{0 if bar.ours else 1}"/>'
            )
            parts.append(_text(WIDTH - EDGE, y, bar.text, "text", "end"))
        for value, said in panel.limits:
            x = EDGE + NAMES + LENGTH * value / longest
            parts.append(f'<path d="M{x:.1f} {top}V{y + 8}" class="limit"/>')
            y += LINE
            parts.append(_text(x, y, said, "bad", "end" if value > longest / 2 else "start"))
        y += 2 * LINE
    return _picture(title, parts, y - LINE)


def lines(title: str, across: str, up: str, drawn: Sequence[Line]) -> str:
    """Draw lines over two logarithmic scales."""
    left, right, top, bottom = EDGE + 60, WIDTH - 190, EDGE + 3 * LINE, EDGE + 3 * LINE + 260
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def at(x: float, y: float) -> tuple[float, float]:
        share = math.log(x / min(xs)) / math.log(max(xs) / min(xs))
        return left + share * (right - left), bottom - (math.log10(y) - low) / (high - low) * (bottom - top)

    parts = [_text(EDGE, top - LINE, up, "quiet"), _text(right, bottom + 2 * LINE, across, "quiet", "end")]
    for power in range(low, high + 1):
        _, y = at(xs[0], 10.0**power)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" class="rule"/>')
        parts.append(_text(left - 8, y + 4, f"{10.0**power:g}", "quiet", "end"))
    for x in sorted(set(xs))[::2]:
        parts.append(_text(at(x, ys[0])[0], bottom + LINE, f"{x:g}", "quiet", "middle"))
    ends = sorted((at(*line.points[-1])[1], number) for number, line in enumerate(drawn))
    placed = -math.inf
    for y, number in ends:
        line = drawn[number]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
        parts.append(f'<polyline points="{places}" class="c{number}" style="fill:none" stroke-width="2"/>')
        placed = max(y + 4, placed + LINE)
        parts.append(_text(right + 10, placed, f"{line.name}: {line.points[-1][1]:.3g}", "text"))
        parts += [f'<circle cx="{x}" cy="{y}" r="3" class="c{number}"/>' for x, y in _pairs(places)]
    return _picture(title, parts, bottom + 3 * LINE)


def _pairs(places: str) -> list[list[str]]:
    return [place.split(",") for place in places.split()]


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _picture(title: str, parts: Sequence[str], height: float) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<style>{STYLE}</style>"]
    head.append(f"<title>{escape(title)}</title>")
    head.append(f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="6" class="ground"/>')
    return "\n".join([*head, _text(EDGE, EDGE + 8, title, "quiet"), *parts, "</svg>\n"])
