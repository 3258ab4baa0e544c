"""A plan as one self-contained HTML page.

`summary` supplies the words and `rows` the lines. The script only filters lines and unfolds reasons, so the
page is complete on paper.

Invariant: the page refers to nothing outside itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources

from zerodrift.plan.cost import Cost
from zerodrift.plan.table import Plan
from zerodrift.plan.timeline import Timeline
from zerodrift.policy.nouns import COLUMNS, Columns
from zerodrift.report import figures, stages, summary
from zerodrift.report.frame import DIGEST_SHOWN
from zerodrift.report.markup import Child, Markup, join, tag
from zerodrift.report.rows import Line, Table

_WIDE = 1000
"""Width of a drawing in SVG units."""

_FIGURES = frozenset(("shape", "elements", "bytes", "per parameter", "count"))
"""Headers of right-aligned columns."""


def plan_page(plan: Plan, cost: Cost, table: Table, timeline: Timeline | None = None) -> str:
    """Build the page of a plan. `timeline` belongs to its pipeline, if it has one."""
    parts = [_head(plan), *plan_sections(plan, cost, table, timeline)]
    return document(f"zerodrift plan: {plan.source}", parts)


def plan_sections(plan: Plan, cost: Cost, table: Table, timeline: Timeline | None = None) -> list[Markup]:
    """Build all sections below the head of a plan. The script needs their ids, so use them once per page."""
    pipeline = plan.policy.pipeline is not None
    decided = [(item.key, item.value, item.why) for item in plan.policy.decisions]
    return [
        _notes(plan),
        section("Columns", _filter(table), _table(table), _marks(table, plan), id="columns"),
        section("Pipeline", *_pipeline(plan, timeline), id="pipeline") if pipeline else Markup(""),
        section("Memory", _memory(plan, cost), id="memory"),
        section("Wire", _wire(cost), id="wire"),
        section("Why", _why(table), id="why"),
        section("Boundaries", *_boundaries(plan, table), id="boundaries") if table.boundaries else Markup(""),
        section("Decisions", _listing(("what", "is", "because"), decided), id="decisions"),
        _optional("Ignored keys", ("key", "because"), plan.policy.ignored, "ignored"),
        _optional("Buffers", ("buffers", "because"), summary.buffers(plan), "buffers"),
        tag("footer", "Digest of every decision ", tag("code", plan.digest)),
        tag("template", tag("tr", tag("td", colspan=str(4 + len(COLUMNS)))), id="unfolded"),
        tag("script", Markup(_asset("page.js"))),
    ]


def document(title: str, body: Child, style: str = "") -> str:
    """Build a self-contained page. `style` is added to the style sheet of every page."""
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(_asset("page.css") + style)),
    ]
    return (
        "<!doctype html>\n" + tag("html", tag("head", head), tag("body", tag("main", body)), lang="en") + "\n"
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# --- head ---------------------------------------------------------------------------------------------


def _head(plan: Plan) -> Markup:
    facts = [
        tag("div", tag("dt", label), tag("dd", value))
        for label, value in summary.facts(plan)
        if label != "model"
    ]
    digest = tag("p", "zerodrift plan ", tag("code", plan.digest[:DIGEST_SHOWN]), class_="kicker")
    return tag("header", digest, tag("h1", breaking(plan.source)), tag("dl", facts, class_="facts"))


def _notes(plan: Plan) -> Markup:
    if not plan.notes:
        return Markup("")
    return tag("ul", [tag("li", note) for note in plan.notes], class_="notes")


def section(title: str, *children: Markup, id: str) -> Markup:
    return tag("section", tag("h2", title), children, id=id)


# --- the table ----------------------------------------------------------------------------------------


def _filter(table: Table) -> Markup:
    field = tag(
        "input",
        type="search",
        id="filter",
        placeholder="Filter: router fp32 ...",
        aria_label="Show lines that contain all of these words",
    )
    count = tag("output", f"{len(table.lines)} lines", id="count", for_="filter")
    hint = tag("span", "Hover over a cell for its reason, click a line for all of them.", class_="quiet")
    return tag("p", field, " ", count, " ", hint, class_="filter")


def _table(table: Table) -> Markup:
    names = ("set", "parameter", "shape", "elements", *COLUMNS)
    head = tag("thead", tag("tr", heads(names)))
    cells = [_cells(item.columns) for item in table.sets]
    kinds = [summary.kind(item.columns) for item in table.sets]
    lines = [
        tag(
            "tr",
            tag("td", table.sets[line.set].letter, class_="set"),
            tag("td", _name(line, kinds[line.set]), class_="name"),
            tag("td", figures.shape(line.shape), class_="number"),
            tag("td", figures.elements(line.numel), class_="number"),
            cells[line.set],
            class_=" ".join(["line", *kinds[line.set].split(", ")]).strip(),
            data_set=table.sets[line.set].letter,
            tabindex="0",
        )
        for line in table.lines
    ]
    return tag("div", tag("table", head, tag("tbody", lines), class_="rows"), class_="scroll")


def heads(names: Iterable[str]) -> list[Markup]:
    """Build column headers. Headers of figures are aligned right."""
    return [tag("th", name, scope="col", class_=name in _FIGURES and "number") for name in names]


def _name(line: Line, kind: str) -> Markup:
    count = tag("b", f" x{line.count}") if line.count > 1 else ""
    badge = tag("span", kind, class_="badge") if kind else ""
    also = [tag("div", "= ", breaking(name), class_="quiet") for name in line.also]
    return join([breaking(line.pattern), count, " ", badge, also])


def _cells(columns: Columns) -> Markup:
    """Build the nine cells of a line. Rows with the same columns share this text."""
    words, why = summary.describe_columns(columns), columns.reasons()
    cells = []
    for column, text in columns.cells().items():
        reason = why.get(column, "")
        label = f"{column}: {words[column]}" + (f"\n{reason}" if reason else "")
        dtype = text.replace("same", str(columns.storage.dtype))
        cells.append(tag("td", text, class_=f"cell {tint(dtype)}".strip(), title=label))
    return join(cells)


def tint(text: str) -> str:
    """Return the colour class of a cell: the narrowest dtype in its text."""
    return next((colour for word, colour in _TINTS.items() if word in text), "")


_TINTS = {
    "fp8": "fp8",
    "uint8": "fp8",
    "fp16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "split": "split",
}
"""Our dtype names and torch's, narrowest first. `bfloat16` stands before `float16`, which it contains."""


def _marks(table: Table, plan: Plan) -> Markup:
    pairs = [tag("div", tag("dt", mark), tag("dd", meaning)) for mark, meaning in summary.marks(table, plan)]
    return tag("dl", pairs, class_="marks")


def _why(table: Table) -> Markup:
    """Build a table per column set: each column, its value and its reason. The script unfolds them."""
    blocks = []
    for item in table.sets:
        words = summary.describe_columns(item.columns) | summary.options(item.columns)
        lines = [
            tag("tr", tag("th", name, scope="row"), tag("td", words[name]), tag("td", reason))
            for name, reason in item.columns.why
        ]
        kind = summary.kind(item.columns)
        caption = [tag("b", item.letter), " ", tag("span", kind, class_="badge") if kind else ""]
        blocks.append(
            tag(
                "table",
                tag("caption", caption, " ", summary.amount(item, table)),
                tag("tbody", lines),
                class_="why",
                id=f"why-{item.letter}",
            )
        )
    return join(blocks)


# --- drawings -----------------------------------------------------------------------------------------


def _memory(plan: Plan, cost: Cost) -> Markup:
    """Draw memory at rest and at peak to one scale."""
    rest, peak = summary.rest_parts(cost), summary.peak_parts(cost)
    most = max(cost.rest.total, cost.peak.total, 1)
    return join(
        [
            tag("p", f"Bytes of {summary.basis(plan, cost)}. Activations are not included.", class_="quiet"),
            tag(
                "div",
                _stack("At rest, between steps", rest, most, cost),
                _stack("At peak, in the middle of a backward", peak, most, cost),
                class_="pair",
            ),
            tag("p", f"Padding {summary.padding(plan, cost)}.", class_="quiet"),
        ]
    )


def _stack(title: str, parts: Sequence[tuple[str, int]], most: int, cost: Cost) -> Markup:
    """Draw one bar of parts, and a legend with the figures."""
    shown = [(label, count) for label, count in parts if count]
    total = sum(count for _, count in shown)
    rects, entries, left = [], [], 0.0
    for label, count in shown:
        width = _WIDE * count / most
        color = f"c-{label.replace(' ', '-')}"
        hover = tag("title", f"{label}: {figures.size(count)}")
        rects.append(tag("g", hover, _rect(left, max(width - 2, 1), color)))
        entries.append(
            tag(
                "tr",
                tag(
                    "td",
                    tag("svg", _rect(0, 28, color), viewBox="0 0 28 28", class_="key", aria_hidden="true"),
                ),
                tag("td", label),
                tag("td", figures.size(count), class_="number"),
                tag("td", summary.per_parameter(count, cost), class_="number"),
            )
        )
        left += width
    sums = [
        tag("td", figures.size(total), class_="number"),
        tag("td", summary.per_parameter(total, cost), class_="number"),
    ]
    entries.append(tag("tr", tag("td"), tag("td", "total"), sums, class_="total"))
    label = f"{title}: {figures.size(total)}"
    bar = _drawing(rects, _WIDE, class_="bar", role="img", aria_label=label)
    head = tag("thead", tag("tr", tag("th"), tag("th"), heads(("bytes", "per parameter"))))
    legend = tag("table", head, tag("tbody", entries), class_="legend")
    return tag("figure", tag("figcaption", f"{title}: ", tag("b", figures.size(total))), bar, legend)


def _wire(cost: Cost) -> Markup:
    if not cost.traffic:
        return tag("p", "Nothing is sent.")
    most = max(line.bytes for line in cost.traffic) or 1
    names = ("op", "purpose", "dtype", "axis", "count", "bytes", "")
    lines = []
    for line in cost.traffic:
        width = max(200 * line.bytes / most, 1)
        bar = _drawing(_rect(0, width, "c-wire"), 200, class_="small", aria_hidden="true")
        lines.append(
            tag(
                "tr",
                [tag("td", text) for text in (line.op, line.purpose)],
                tag("td", line.dtype, class_=f"cell {tint(line.dtype)}".strip()),
                tag("td", line.axis),
                tag("td", f"{line.count:,}", class_="number"),
                tag("td", figures.size(line.bytes), class_="number"),
                tag("td", bar),
            )
        )
    blanks = [tag("td") for _ in range(4)]
    total = tag("td", figures.size(cost.wire), class_="number")
    lines.append(tag("tr", tag("td", "total"), blanks, total, tag("td"), class_="total"))
    head = tag("thead", tag("tr", heads(names)))
    caption = tag("caption", "Sent by one rank per optimizer step, ring bytes")
    return tag("div", tag("table", caption, head, tag("tbody", lines), class_="wire"), class_="scroll")


def _drawing(content: Child, width: int, **attributes: str) -> Markup:
    """Draw bars that fill their box."""
    return tag("svg", content, viewBox=f"0 0 {width} 28", preserveAspectRatio="none", **attributes)


def _rect(left: float, width: float, color: str) -> Markup:
    return tag("rect", x=f"{left:.2f}", y="0", width=f"{width:.2f}", height="28", class_=color)


# --- lists --------------------------------------------------------------------------------------------


def _pipeline(plan: Plan, timeline: Timeline | None) -> list[Markup]:
    listed = [
        _listing(("what", "is"), stages.facts(plan, timeline)),
        _listing(stages.HEADS, stages.ranks(plan, timeline)),
    ]
    if timeline is not None:
        listed += [
            _listing(("place", "order"), stages.order(timeline)),
            tag("p", stages.legend(timeline), class_="quiet"),
        ]
    return listed


def _boundaries(plan: Plan, table: Table) -> list[Markup]:
    entered = summary.input_casts(plan)
    below = summary.embedding_casts(table)
    return [
        tag("p", f"{entered[0].upper()}{entered[1:]}.", class_="quiet"),
        _listing(summary.BOUNDARY_HEADS, summary.boundary_rows(table)),
        tag("p", f"{below[0].upper()}{below[1:]}.", class_="quiet") if below else Markup(""),
    ]


def _optional(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], id: str) -> Markup:
    return section(title, _listing(names, rows), id=id) if rows else Markup("")


def _listing(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    head = tag("thead", tag("tr", heads(names)))
    lines = [tag("tr", [tag("td", breaking(text)) for text in row]) for row in rows]
    return tag("table", head, tag("tbody", lines), class_="listing")


def breaking(text: str) -> Markup:
    """Escape a text and let it wrap after a dot, a slash or an underscore."""
    escaped = join([text])
    for mark in "./_":
        escaped = Markup(escaped.replace(mark, mark + "<wbr>"))
    return escaped
