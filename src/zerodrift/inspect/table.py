"""Set rows of text in columns, for every report of this storey."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.text import Text

from zerodrift.report.frame import elide


def table(
    rows: Sequence[Sequence[str]],
    widths: Sequence[int] | None = None,
    left: Collection[int] = (0,),
    gap: str = "  ",
    bold: int | None = None,
) -> Text:
    """Rows under a dim head. Columns in `left` are words, which are cut; the others are figures, which never
    are. Without `widths` each column is as wide as its longest cell; `bold` is the index of a marked row."""
    widths = widths or [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = Text()
    for number, row in enumerate(rows):
        cells: list[str] = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            if column in left:
                over = len(gap.join([*cells, ""])) - sum(widths[:column]) - column * len(gap)
                cells.append(elide(cell, width - over).ljust(width))
            else:
                cells.append(cell.rjust(width))
        line = gap.join(cells).rstrip()
        style = "dim" if number == 0 else "bold" if number == bold else ""
        text.append(line if number == len(rows) - 1 else f"{line}\n", style=style)
    return text
