"""Draw the nine columns of two parameters through one step, from a plan: the first picture of the README.

Invariant: every dtype on the picture is a cell of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from zerodrift import Plan

STEP = {
    "storage": "at rest",
    "gather": "all-gather",
    "compute": "forward, backward",
    "grad": "out of autograd",
    "accumulate": "+ micro-batches",
    "reduce": "reduce-scatter",
    "master": "updated",
    "state": "moments",
    "export": "in the file",
}
"""Column -> what happens to the parameter there."""
BELOW = {"split": "bf16 + 16 bits", "same": "the weight"}
"""Text below a word that is no dtype."""

EDGE, BOX, HEIGHT, GAP = 22, 92, 46, 10
WIDTH = 2 * EDGE + 9 * BOX + 8 * GAP
STYLE = """\
text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
.mono{font:600 14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.small{font-size:11px}.bold{font-weight:600}
.ground{fill:#fff;stroke:#d1d9e0}.text{fill:#1f2328}.quiet{fill:#59636e}
.arrow{stroke:#8c959f;fill:none}.head{fill:#8c959f}
.bf16{fill:#ddf0fb;stroke:#2a86b8}.fp32{fill:#dff3e1;stroke:#2f8a43}.split{fill:#dff3e1;stroke:#2f8a43}
.same{fill:#dff3e1;stroke:#2f8a43}.cut{stroke:#1f2328;stroke-dasharray:2 2;opacity:.6}
@media (prefers-color-scheme:dark){
.ground{fill:#0d1117;stroke:#3d444d}.text{fill:#f0f6fc}.quiet{fill:#9198a1}.arrow{stroke:#656c76}.head{fill:#656c76}
.bf16{fill:#12303f;stroke:#4fa9d8}.fp32{fill:#14331b;stroke:#4cae62}.split{fill:#14331b;stroke:#4cae62}
.same{fill:#14331b;stroke:#4cae62}.cut{stroke:#f0f6fc}}"""


def columns_picture(plan: Plan, rows: Mapping[str, str]) -> str:
    """Return the SVG. `rows` has a heading for each parameter that is drawn."""
    parts = [
        _text(EDGE, 30, "Nine dtypes of one parameter in one training step", "text bold"),
        _text(WIDTH - EDGE, 30, "a dashed line: sharded over the ranks", "quiet small", "end"),
    ]
    for number, (column, words) in enumerate(STEP.items()):
        middle = _left(number) + BOX / 2
        parts += [
            _text(middle, 62, column, "text mono", "middle"),
            _text(middle, 79, words, "quiet small", "middle"),
        ]
    y = 96
    for name, heading in rows.items():
        cells = plan.row(name).columns.cells()
        assert tuple(cells) == tuple(STEP)
        parts.append(_text(EDGE, y + 14, heading, "text small bold"))
        y += 24
        for number, cell in enumerate(cells.values()):
            parts += _box(_left(number), y, cell, number)
        parts += _back_to_the_start(y + HEIGHT)
        y += HEIGHT + 44
    height = y + 2
    ground = f'<rect class="ground" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    title = "The nine columns of two parameters: " + "; ".join(
        f"{heading}: "
        + ", ".join(f"{column} {cell}" for column, cell in plan.row(name).columns.cells().items())
        for name, heading in rows.items()
    )
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    return f"{head}<style>{STYLE}</style>{ground}{''.join(parts)}</svg>\n"


def _left(number: int) -> int:
    return EDGE + number * (BOX + GAP)


def _box(x: int, y: int, cell: str, number: int) -> list[str]:
    dtype, is_sharded = cell.rstrip("/"), cell.endswith("/")
    parts = [f'<rect class="{dtype}" x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="6"/>']
    if is_sharded:
        middle, below = x + BOX / 2, "" if dtype in BELOW else f"M{x + BOX / 2} {y + HEIGHT - 11}v7"
        parts.append(f'<path class="cut" d="M{middle} {y + 4}v7{below}"/>')
    line = y + HEIGHT / 2 + (1 if dtype in BELOW else 5)
    parts.append(_text(x + BOX / 2, line, dtype, "text mono", "middle"))
    if dtype in BELOW:
        parts.append(_text(x + BOX / 2, line + 14, BELOW[dtype], "quiet small", "middle"))
    if number:
        parts.append(f'<path class="head" d="M{x - 1} {y + HEIGHT / 2}l-7 -4v8z"/>')
    return parts


def _back_to_the_start(y: int) -> list[str]:
    """Draw the way from the master back to storage."""
    start, end = _left(6) + BOX / 2, _left(0) + BOX / 2
    return [
        f'<path class="arrow" d="M{start} {y + 2}v14H{end}v-8"/>',
        f'<path class="head" d="M{end} {y + 1}l-4 7h8z"/>',
        _text(
            (start + end) / 2,
            y + 30,
            "the update writes the weight of the next step",
            "quiet small",
            "middle",
        ),
    ]


def _text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    place = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{style}" x="{x:g}" y="{y:g}"{place}>{escape(words)}</text>'
