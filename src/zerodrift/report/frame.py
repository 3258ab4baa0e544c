"""Layout of text reports: titles, sections, columns and the final rendering.

A width counts terminal cells. Some characters take two cells or none.

Invariant: foreign text becomes `Text` through `legible_text` and `elide`. `render` returns no line that is
wider than asked for, and no colour codes unless asked for.
"""

from __future__ import annotations

import io
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from zerodrift.legible import legible
from zerodrift.report.blocks import FactList, PageSection, PageTable, Paragraph, Preformatted

WIDTH = 100  # columns of a text report outside a terminal
NARROWEST, WIDEST = 50, 120  # limits of its columns elsewhere

_LEAST = 8  # columns below which a grid column is not narrowed

DIGEST_SHOWN = 12
"""Hex digits of a digest in a title. JSON and the foot of a page have all of them."""


def report_width() -> int:
    """Return the columns of a text report: COLUMNS if it is set, those of the terminal, or else WIDTH."""
    return max(NARROWEST, min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDEST))


def title(verb: str, digest: str = "", width: int | None = None) -> RenderableType:
    """Return the first line of a report, with a rule below it."""
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
    """Set rows in columns of at most `most` cells each. The last column wraps in the rest of the line."""
    total = width or WIDTH
    needed = [
        min(limit, max((cell_len(legible(row[index])) for row in rows), default=0))
        for index, limit in enumerate(most)
    ]
    # A narrow terminal narrows the widest columns, so that the last one has room for words.
    while total < WIDTH and needed and max(needed) > _LEAST and sum(needed) + 2 * len(needed) > total * 0.65:
        needed[needed.index(max(needed))] -= 1
    widths = [*needed, total - sum(needed) - 2 * len(needed)]
    cells = [list(map(legible_text, row)) for row in rows]
    return columns(widths, cells, styles=(*styles, ""), gap=2, folds=True)


def columns(
    widths: Sequence[int],
    rows: Iterable[Sequence[RenderableType]],
    right: Collection[int] = (),
    styles: Sequence[str] = (),
    gap: int = 0,
    folds: bool = False,
) -> RenderableType:
    """Set cells in columns of fixed widths, those in `right` aligned right. Long cells fold or are cut."""
    table = Table.grid(padding=(0, gap, 0, 0), pad_edge=False)
    for number, width in enumerate(widths):
        table.add_column(
            width=width,
            justify="right" if number in right else "left",
            overflow="fold" if folds else "ellipsis",
            no_wrap=not folds,
            style=styles[number] if styles else "",
        )
    for row in rows:
        table.add_row(*row)
    return table


def legible_text(text: str, style: str = "") -> Text:
    """Return foreign text as legible `Text`, without markup."""
    return Text(legible(text), style=style)


def elide(text: str, width: int) -> str:
    """Return a legible name. `...` replaces its middle components if it is wider than `width` cells."""
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
    if tail == parts[-1] and len(parts) > 2 and width > _LEAST:  # it alone names nothing
        return _without_beginning(text, width)
    short = f"{head}...{tail}"
    if cell_len(short) <= width:
        return short
    keep = max(width - 3, 2)
    first = _clip(text, keep // 2)
    return first + "..." + _clip(text[::-1], keep - keep // 2)[::-1] if width > 5 else _clip(text, width)


def elide_distinct(texts: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return legible names of which no two become alike: those that would lose their beginning instead."""
    short = [elide(text, width) for text, width in zip(texts, widths, strict=True)]
    count, whole = Counter(short), map(legible, texts)
    return [
        _without_beginning(text, width) if count[name] > 1 else name
        for name, text, width in zip(short, whole, widths, strict=True)
    ]


def _without_beginning(text: str, width: int) -> str:
    return text if cell_len(text) <= width else "..." + _clip(text[::-1], max(width - 3, 0))[::-1]


def _clip(text: str, width: int) -> str:
    """Return the beginning of a text that fits `width` cells."""
    return set_cell_size(text, width).rstrip() if cell_len(text) > width else text


def render(parts: Iterable[RenderableType], color: bool, width: int | None = None) -> str:
    """Render the parts as one text. Plain text has no blanks at line ends."""
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
    console.print(*parts, sep="\n", crop=False)
    text = out.getvalue().replace("\N{NO-BREAK SPACE}", " ")
    return text if color else "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def fitted_table(table: PageTable, width: int) -> RenderableType:
    """Set the table of a page in text: words are elided, the longest first, and figures are whole.

    Heads are dim, and rows that begin with `>` are bold. The columns in `wide_only` are left out below 80
    columns, and a line says so.
    """
    left_out = table.wide_only if width < 80 else ()
    kept = [number for number, head in enumerate(table.heads) if head not in left_out]
    every = [table.heads, *(row.cells for row in table.page_rows())]
    lines = [[line[number] for number in kept] for line in every]
    texts = [[cell if isinstance(cell, str) else cell.text for cell in line] for line in lines]
    words = [at for at, number in enumerate(kept) if table.heads[number] not in table.figures]
    widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
    gap = "  " if sum(widths) + 2 * len(widths) - 2 <= width else " "
    room = width - len(gap) * (len(widths) - 1)
    while words and sum(widths) > room and max(widths[at] for at in words) > 4:
        widths[max(words, key=lambda at: widths[at])] -= 1
    text = Text()
    for number, row in enumerate(texts):
        cells = [
            elide(cell, wide).ljust(wide) if at in words else cell.rjust(wide)
            for at, (cell, wide) in enumerate(zip(row, widths, strict=True))
        ]
        style = "dim" if number == 0 else "bold" if row[0] == ">" else ""
        text.append(("\n" if number else "") + gap.join(cells).rstrip(), style=style)
    note = Text(f"80 columns also show: {', '.join(left_out)}", style="dim")
    return Group(text, *([note] if left_out else []))


def sections_text(sections: Iterable[PageSection], width: int) -> list[RenderableType]:
    """Draw sections of a page as text. Code is never wrapped: people copy it."""
    parts: list[RenderableType] = []
    for each in sections:
        parts.append(section(each.title, each.detail))
        for number, block in enumerate(each.blocks):
            parts += [Text()] if number and not isinstance(block, FactList) else []
            if isinstance(block, PageTable):
                parts.append(fitted_table(block, width))
            elif isinstance(block, Preformatted):
                parts.append(Group(Text(block.text, style="green", no_wrap=True, overflow="ignore")))
            elif isinstance(block, Paragraph):
                parts.append(legible_text(block.text, "dim" if block.style == "quiet" else ""))
            elif isinstance(block, FactList) and block.style == "findings":
                for kind, where, *texts in block.rows:
                    named = Text().append(kind, style="bold red").append(f"  {elide(where, width - 20)}")
                    parts += [named, grid([("", text) for text in texts], (2,), ("",), width), Text()]
            elif isinstance(block, FactList):
                parts.append(grid(block.rows, (8,), ("dim",), width))
    return parts


def markdown_text(text: str, *, color: bool, width: int = WIDTH) -> str:
    """Render Markdown as it reads on a terminal; links within our pages become their words."""
    from rich.markdown import Markdown

    plain = re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", text)
    return render([Markdown(plain, hyperlinks=False)], color, width)
