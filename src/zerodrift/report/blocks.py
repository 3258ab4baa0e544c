"""Blocks of a page, and the page that shows them: one HTML file that refers to nothing outside itself.

The rooms of the package choose the blocks of their pages: facts, tables, bars, charts. The jinja2 templates
in `html` have one macro for each class of block, and `page.css` is the style of all pages. torch requires
jinja2, so it is always installed. `frame` draws the same blocks on a terminal.

Invariant: every text is made legible and escaped, except the HTML of templates.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerodrift.legible import lines
from zerodrift.report import figures

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TINTS = ("fp8", "uint8", "fp16", "bf16", "bfloat16", "float16", "fp32", "float32", "split")
"""Our dtype names and torch's, narrowest first. `bfloat16` stands before `float16`, which it contains."""
_COLORS = {"uint8": "fp8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class FactList:
    """Terms, each with one or more texts."""

    rows: Sequence[Sequence[str]]
    style: str = "facts"  # class of the style sheet: `facts`, `marks`, `tiles` or `findings`


@dataclass(frozen=True, slots=True)
class PageCell:
    """Cell that is more than a text."""

    text: str = ""
    style: str = ""  # classes of the style sheet
    hover: str = ""
    count: str = ""
    badge: str = ""
    below: Sequence[str] = ()  # quiet lines below the text
    bar: float | None = None  # length of a bar, 0 to 1
    heat: float | None = None  # strength of a red background, 0 to 1
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class PageRow:
    """Row that is more than its cells."""

    cells: Sequence[str | PageCell]
    style: str = ""
    set: str = ""  # letter of the column set that the script unfolds below the row


@dataclass(frozen=True, slots=True)
class PageTable:
    heads: Sequence[str]
    rows: Sequence[PageRow | Sequence[str | PageCell]]
    style: str = "listing"  # class of the style sheet: `listing`, `rows`, `wire`, `why`, `map` or `precision`
    figures: Collection[str] = ("shape", "elements", "bytes", "per parameter", "count")
    """Heads of right-aligned columns."""
    caption: str = ""
    badge: str = ""
    id: str = ""
    filtered: bool = False  # True for the table of a plan, which has a field to filter it
    wide_only: Collection[str] = ()  # heads that a text of less than 80 columns leaves out

    def page_rows(self) -> list[PageRow]:
        return [row if isinstance(row, PageRow) else PageRow(row) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str
    style: str = "quiet"


@dataclass(frozen=True, slots=True)
class Preformatted:
    text: str
    bold: str = ""  # text in bold in front
    title: str = ""


@dataclass(frozen=True, slots=True)
class ErrorBanner:
    """Error of a run."""

    heading: str
    text: str


@dataclass(frozen=True, slots=True)
class NoteList:
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class StackedBar:
    """Bytes by part as one bar, with a legend."""

    title: str
    parts: Sequence[tuple[str, int]]
    most: int  # bytes of the whole width
    parameters: int  # parameters that a byte is divided by in the legend

    @property
    def total(self) -> int:
        return sum(count for _, count in self.parts)

    def per_parameter(self, count: int) -> str:
        return figures.per_parameter(count, self.parameters)

    def rectangles(self) -> list[tuple[str, int, float, float]]:
        """Return (label, bytes, left, width) of each part, in thousandths of the width."""
        placed, left = [], 0.0
        for label, count in self.parts:
            if count:
                width = 1000 * count / self.most
                placed.append((label, count, left, max(width - 2, 1)))
                left += width
        return placed


@dataclass(frozen=True, slots=True)
class BlockRow:
    """Blocks side by side where they fit."""

    blocks: Sequence[Any]
    style: str  # class of the style sheet: `pair`, `charts` or `samples`


@dataclass(frozen=True, slots=True)
class PageSection:
    title: str  # heading, or `""` for none
    id: str
    blocks: Sequence[Any]  # a section without blocks is left out
    detail: str = ""  # what a text has behind the title


@dataclass(frozen=True, slots=True)
class PageHead:
    heading: str
    kicker: str = ""
    state: str = ""  # class of the style sheet: `running`, `done`, `stopped` or `failed`
    state_words: str = ""
    below: str = ""
    facts: Sequence[tuple[str, str]] = ()


def page(title: str, head: PageHead, sections: Sequence[PageSection], digest: str = "") -> str:
    """Return a page. A page with the table of a plan has the plan's `digest` and a script for the table."""
    shown = [section for section in sections if section.blocks]
    return _environment().get_template("page.html").render(
        title=title, head=head, sections=shown, digest=digest
    )  # fmt: skip


def table_section(
    title: str, id: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: str = ""
) -> PageSection:
    """Return a section with a table, or an empty section without rows."""
    blocks = [*([Paragraph(words)] if words else []), PageTable(heads, rows)]
    return PageSection(title, id, blocks if rows else ())


def dtype_cell(text: str, dtype: str = "", hover: str = "") -> PageCell:
    """Return a cell in the colour of the narrowest dtype that `dtype`, or else the text, names."""
    word = next((word for word in _TINTS if word in (dtype or text)), "")
    return PageCell(text, f"cell {_COLORS.get(word, word)}".strip(), hover)


def show(block: Any) -> Markup:
    """Return the HTML of one block."""
    macro = getattr(_environment().get_template("blocks.html").module, type(block).__name__)
    shown: Markup = macro(block)
    return shown


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def escaped(value: Any) -> Any:
        if isinstance(value, float):
            return f"{value:g}"
        is_text = isinstance(value, str) and not isinstance(value, Markup)
        return Markup(html.escape(lines(value))) if is_text else value

    def breaking(text: str) -> Markup:
        """Let a long text wrap after a dot, a slash or an underscore."""
        shown = escaped(text)
        for mark in "./_" if len(text) > 20 else "":
            shown = shown.replace(mark, Markup(mark + "<wbr>"))
        return Markup(shown)

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("html"), encoding="utf-8"),
        autoescape=True,
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"show": show, "breaking": breaking, "size": figures.size}
    return environment
