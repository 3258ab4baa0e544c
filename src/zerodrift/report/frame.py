"""The pieces that every text report is set with: a title, sections, columns that wrap, the final print.

Nothing here knows what a plan is. A width is in cells of a terminal, of which some characters take two or
none.

Invariant: text that is not ours becomes `Text` through `shown` and `elide`; what `printed` returns has no
line wider than WIDTH, and no colour codes unless asked for.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from zerodrift.legible import legible

WIDTH = 100
"""Columns of a text report that nobody looks at on a terminal: it can be compared and pasted."""

_LEAST = 8
"""Columns that a word takes."""

DIGEST_SHOWN = 12
"""Hex digits of the digest in a title; JSON and the foot of the page have all of them."""


def title(verb: str, digest: str = "", width: int | None = None) -> RenderableType:
    left = Text().append("zerodrift", style="bold").append(f" {verb}")
    if digest:
        right = Text().append("digest ", style="dim").append(digest[:DIGEST_SHOWN])
        left.append(" " * ((width or WIDTH) - len(left) - len(right))).append_text(right)
    return Group(left, Rule(style="dim"))


def section(name: str, detail: str = "") -> Text:
    text = Text("\n").append(name, style="bold")
    return text.append(f"   {detail}", style="dim") if detail else text


def pairs(
    facts: Iterable[tuple[str, str]], *, bold: bool = False, width: int | None = None
) -> RenderableType:
    return grid(list(facts), most=(12,), styles=("bold" if bold else "dim",), width=width)


def grid(
    rows: Sequence[Sequence[str]], most: Sequence[int], styles: Sequence[str], width: int | None = None
) -> RenderableType:
    """Columns as wide as they need and at most `most`; the last takes the rest of the line and wraps."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    total = width or WIDTH
    needed = [
        min(limit, max((cell_len(legible(row[index])) for row in rows), default=0))
        for index, limit in enumerate(most)
    ]
    # On a narrow terminal the widest give way, so that the last has room for words.
    while total < WIDTH and needed and max(needed) > _LEAST and sum(needed) + 2 * len(needed) > total * 0.65:
        needed[needed.index(max(needed))] -= 1
    for wide, style in zip(needed, styles, strict=False):
        table.add_column(width=wide, overflow="fold", style=style)
    table.add_column(width=total - sum(needed) - 2 * len(needed), overflow="fold")
    for row in rows:
        table.add_row(*map(shown, row))
    return table


def shown(text: str, style: str = "") -> Text:
    """Somebody's text for a terminal: legible, its brackets no markup."""
    return Text(legible(text), style=style)


def elide(text: str, width: int) -> str:
    """A legible name, its middle components replaced by one `...` where it takes more than `width` cells; the
    ends say most."""
    text = legible(text)
    if cell_len(text) <= width:
        return text
    parts = text.split(".")
    head, middle, tail = "", parts[:-1], parts[-1]
    while len(middle) > 1:
        longer_head, longer_tail = f"{head}{middle[0]}.", f"{middle[-1]}.{tail}"
        room = width - cell_len(head) - cell_len(tail) - 3
        fits_head, fits_tail = cell_len(middle[0]) < room, cell_len(middle[-1]) < room
        if fits_head and (cell_len(head) < cell_len(tail) or not fits_tail):
            head, middle = longer_head, middle[1:]
        elif fits_tail:
            tail, middle = longer_tail, middle[:-1]
        else:
            break
    short = f"{head}...{tail}"
    if cell_len(short) <= width:
        return short
    keep = max(width - 3, 2)
    first = _fitting(text, keep // 2)
    return (
        first + "..." + _fitting(text[::-1], keep - keep // 2)[::-1] if width > 5 else _fitting(text, width)
    )


def _fitting(text: str, width: int) -> str:
    """The beginning of a text that takes at most so many cells."""
    return set_cell_size(text, width).rstrip() if cell_len(text) > width else text


def printed(parts: Iterable[RenderableType], color: bool, width: int | None = None) -> str:
    """The parts as one text; plain text carries no blanks at line ends."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or WIDTH,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        force_jupyter=False,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(*parts, sep="\n")
    text = out.getvalue().replace("\N{NO-BREAK SPACE}", " ")
    return text if color else "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
