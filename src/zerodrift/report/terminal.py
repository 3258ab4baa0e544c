"""A plan or one parameter as terminal text.

`rows` supplies the lines and `summary` the words. Each column set shows its nine cells once, followed by its
parameters.

Invariant: no line is wider than asked for, and colour carries no information of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from zerodrift.errors import listed
from zerodrift.legible import legible
from zerodrift.plan import Boundary, Cost, Plan, Timeline
from zerodrift.policy import COLUMNS, Columns
from zerodrift.report import figures, summary
from zerodrift.report.explanation import Explanation
from zerodrift.report.frame import WIDTH, columns, elide, elide_distinct, grid, pairs, render, section, title
from zerodrift.report.rows import Line, Table

_INDENT = 3
_BILL = 47
"""Width of a cost table. Two stand side by side if they fit."""
_MOST_SLICES = 6
_MOST_SETS = 5  # column sets in `brief_text`, which counts the others in one line
_MOST_IGNORED = 3  # ignored keys in `brief_text` that have their reasons there

_STYLES = (("fp32", "green"), ("split", "green"), ("bf16", "cyan"), ("fp16", "magenta"), ("fp8", "red"))
"""Colours of dtypes."""


def plan_text(
    plan: Plan, cost: Cost, table: Table, timeline: Timeline | None = None, *, color: bool, width: int = WIDTH
) -> str:
    """Render a whole plan. `timeline` belongs to its pipeline, if it has one."""
    decisions = [(each.key, each.value, each.why) for each in plan.policy.decisions]
    parts = [title("plan", plan.digest, width), *_rows(plan, table, summary.facts(plan), width)]
    parts += [section("decisions"), grid(decisions, (24, 38), ("", "bold"), width)]
    if plan.buffers:
        parts += [section("buffers"), grid(summary.buffers(plan), (40,), ("",), width)]
    if plan.policy.ignored:
        parts += [section("ignored keys"), grid(plan.policy.ignored, (46,), ("",), width)]
    if plan.policy.pipeline is not None:
        parts += [section("pipeline"), *_pipeline(plan, timeline, width)]
    parts += [section("cost", summary.basis(plan, cost)), *_cost(plan, cost, width)]
    if plan.notes:
        parts += [section("notes"), grid([("!", note) for note in plan.notes], (1,), ("bold yellow",), width)]
    return render(parts, color, width)


def _rows(plan: Plan, table: Table, facts: Iterable[tuple[str, str]], width: int) -> list[RenderableType]:
    """Render facts, the table with its marks and reasons, and the boundaries at which dtypes change."""
    percent = ("%", "the set's part of all elements of the model")
    parts = [
        pairs(facts, width=width),
        Text(),
        _table(table, width),
        section("marks"),
        pairs([percent, *summary.marks(table, plan)], bold=True, width=width),
        section("why"),
        grid(summary.reasons(table.shown()), (9, 34), ("bold", ""), width),
    ]
    if table.boundaries:
        lines, below = [summary.BOUNDARY_HEADS, *summary.boundary_rows(table)], summary.embedding_casts(table)
        parts.append(section("boundaries", summary.input_casts(plan)))
        parts.append(grid(lines, (40, 11, 19), ("", "", "bold"), width))
        parts += [Text(below, style="dim")] if below else []
    return parts


def _pipeline(plan: Plan, timeline: Timeline | None, width: int) -> list[RenderableType]:
    held = [
        (place, *rest, pieces)
        for place, pieces, *rest in (summary.PIPELINE_HEADS, *summary.pipeline_ranks(plan, timeline))
    ]
    facts = pairs(summary.pipeline_facts(plan, timeline), width=width)
    parts = [facts, grid(held, (8, 8, 10, 10, 5), ("",) * 5, width)]
    if timeline is not None:
        order, legend = summary.pipeline_order(timeline), summary.pipeline_legend(timeline)
        parts += [grid(order, (8,), ("",), width), Text(legend, style="dim")]
    return parts


def rows_text(plan: Plan, table: Table, *, color: bool, width: int = WIDTH) -> str:
    facts = [("model", plan.source), ("shown", f"{len(table.lines)} of {len(plan.rows)} parameters")]
    return render([title("rows", plan.digest, width), *_rows(plan, table, facts, width)], color, width)


def explanation_text(explanation: Explanation, digest: str, *, color: bool, width: int = WIDTH) -> str:
    """Render one parameter: its place, its cells and their reasons."""
    facts = [
        ("parameter", explanation.names[0] + (f" ({explanation.kind})" if explanation.kind else "")),
        *(("=", name) for name in explanation.names[1:]),
        ("shape", f"{figures.shape(explanation.shape)}, {explanation.numel:,} elements"),
        ("source", explanation.source),
        ("class", explanation.klass or "not known to this source"),
        ("unit", (explanation.unit or "the root") + f", pipeline stage {explanation.pipeline_stage}"),
        ("segment", f"{explanation.segment}, from element {explanation.offset:,}"),
        *_slices(explanation),
    ]
    facts += [("boundary", _boundary(boundary, explanation.klass)) for boundary in explanation.boundaries]
    if "pinned" in explanation.kind and not explanation.boundaries:
        facts.append(("boundary", "none: no module around it casts its inputs"))
    cells = [(cell.column, cell.words, cell.why) for cell in (*explanation.cells, *explanation.options)]
    parts = [title("explain", digest, width), pairs(facts, width=width), section("columns")]
    return render([*parts, grid(cells, most=(10, 30), styles=("", "bold"), width=width)], color, width)


def _boundary(boundary: Boundary, klass: str) -> str:
    returned = summary.OUTPUT[boundary.output]
    if boundary.lookup is not None and "Embedding" in klass:
        returned = str(boundary.lookup)
    why = summary.boundary_reason(boundary)
    return f"{boundary.path} computes in {boundary.dtype}, returns {returned}: {why}"


def _table(table: Table, width: int) -> RenderableType:
    """Render the headers, and each column set followed by its lines.

    Where the nine columns do not fit on a line, each cell is written behind its name.
    """
    sets = [(item, item.columns.cells()) for item in table.shown()]
    widths = [max(len(column), *(len(cells[column]) for _, cells in sets)) for column in COLUMNS]
    # Two blanks between columns, one where rare dtypes make all of them wide.
    gap = 2 if sum(widths) + 2 * len(widths) <= width - 6 else 1
    left = max(0, width - sum(widths) - gap * len(widths))
    fits = left >= len("set") or width >= WIDTH

    def line(label: Text, cells: Iterable[Text]) -> Text:
        shown = label.copy()
        shown.append(" " * (left - len(label)))
        for cell, wide in zip(cells, widths, strict=True):
            shown.append(" " * gap).append_text(cell).append(" " * (wide - len(cell)))
        shown.rstrip()
        return shown

    parts: list[RenderableType] = [line(Text("set"), map(Text, COLUMNS)) if fits else Text("set")]
    parts.append(Rule(style="dim"))
    for number, (item, cells) in enumerate(sets):
        parts += [Text()] if number else []
        kind, share = summary.kind(item.columns), summary.percent_of_elements(item, table)
        label = Text(item.letter, style="bold")
        if fits:
            for words in ((kind, share), (kind or share,)):
                text = "  ".join(filter(None, words))
                if text and len(label) + 2 + len(text) <= left:
                    style = "bold yellow" if kind else "dim"
                    label = Text.assemble((item.letter, "bold"), "  ", (text, style))
                    break
            parts.append(line(label, (_cell(cells[column]) for column in COLUMNS)))
        else:
            label.append("".join(f"  {word}" for word in (kind, share) if word))
            # A column stays with its value: NBSP does not break.
            named = (Text(f"{name}\N{NO-BREAK SPACE}") + _cell(text) for name, text in cells.items())
            parts += [label, Padding(Text("  ").join(named), (0, 0, 0, _INDENT))]
        parts.extend(_lines(table.members(item), item.columns.pinned, width))
    return Group(*parts)


def _cell(text: str) -> Text:
    """Colour a cell by dtype. The marks `/` and `>` stay plain."""
    shown = Text(text)
    for word, style in _STYLES:
        shown.highlight_regex(rf"{word}[-\w]*", f"bold {style}")
    return shown


def _lines(lines: Sequence[Line], pinned: bool, total: int) -> Iterable[Text]:
    """Render the parameters of a column set: pattern and count, shape, elements."""
    shapes = [figures.shape(line.shape) for line in lines]
    width = min(max(map(len, shapes)), 36, total * 36 // WIDTH)
    room = total - _INDENT - width - 10
    counts = [f" x{line.count}" if line.count > 1 else "" for line in lines]
    names = elide_distinct([line.pattern for line in lines], [room - len(count) for count in counts])
    mark = "* " if pinned else ""
    for line, shape, name, count in zip(lines, shapes, names, counts, strict=True):
        text = Text().append(mark.rjust(_INDENT), style="bold yellow")
        text.append(name).append(count, style="bold")
        also = [f" = {legible(other)}" for other in line.also]
        fits = cell_len(name) + len(count) + sum(map(cell_len, also)) <= room
        text.append("".join(also if fits else ()), style="dim")
        text.append(" " * (_INDENT + room - text.cell_len))
        text.append(f"  {elide(shape, width).rjust(width)}{figures.elements(line.numel).rjust(8)}")
        yield text
        for other in () if fits else also:
            yield Text(" " * (_INDENT + 1) + elide(other, room), style="dim")


def _cost(plan: Plan, cost: Cost, width: int) -> Iterable[RenderableType]:
    rest = _bill("at rest", summary.rest_parts(cost), cost.rest.total, cost)
    peak = _bill("at peak, without activations", summary.peak_parts(cost), cost.peak.total, cost)
    if width >= 2 * _BILL:
        yield columns([width // 2] * 2, [(rest, peak)], folds=True)
    else:
        yield from (rest, Text(), peak)
    yield Text()
    yield from _wire(cost, width)
    yield Text()
    yield Text(f"padding {summary.padding(plan, cost)}")


def _bill(heading: str, parts: Iterable[tuple[str, int]], total: int, cost: Cost) -> RenderableType:
    """Render bytes by part with bars. Zero parts are left out."""
    most = max(cost.rest.total, cost.peak.total)
    rows: list[Sequence[RenderableType]] = []
    for label, count in parts:
        if count:
            per_parameter, bar = figures.per_parameter(count, cost.parameters), _bar(count, most, 14)
            rows.append((label, figures.size(count), per_parameter, Text(bar, style="blue")))
    totals = ("total", figures.size(total), figures.per_parameter(total, cost.parameters))
    rows.append((*(Text(text, style="bold") for text in totals), Text("bytes/param", style="dim")))
    return Group(Text(heading, style="bold"), columns((10, 9, 7, 14), rows, right=(1, 2), gap=2))


def _wire(cost: Cost, width: int) -> Iterable[RenderableType]:
    if not cost.traffic:
        yield Text("nothing is sent")
        return
    yield Text("on the wire, sent by one rank per step", style="bold")
    gap = 2 if width >= WIDTH - 20 else 1
    widths = [14, 9, 5, max(9, *(len(line.axis) for line in cost.traffic)), 8, 9]
    length = max(0, width - sum(widths) - gap * 6)
    most = max(line.bytes for line in cost.traffic)
    rows: list[Sequence[RenderableType]] = []
    for line in cost.traffic:
        bar = Text(_bar(line.bytes, most, length), style="blue")
        row = (line.op, line.purpose, line.dtype, line.axis, f"x{line.count:,}", figures.size(line.bytes))
        rows.append((*row, bar)[: 7 if length else 6])
    rows.append((Text("total", style="bold"), "", "", "", "", Text(figures.size(cost.wire), style="bold")))
    yield columns([*widths, *([length] if length else [])], rows, right=(4, 5), gap=gap)


def _bar(value: int, of: int, width: int) -> str:
    """Return a bar of whole blocks, at least one unless the value is zero."""
    return "█" * max(1, round(width * value / of)) if value and of else ""


def _slices(explanation: Explanation) -> list[tuple[str, str]]:
    """Describe the elements that each rank owns, without the middle of a long list."""
    if not explanation.sharded or explanation.shard == 1:
        whose = "on every rank" if not explanation.divided else "on the ranks that have its experts"
        return [("slices", f"none: whole {whose}")] if explanation.shard > 1 else []
    lines = [
        f"rank {owned.rank} of {explanation.shard}: elements {owned.start:,} to {owned.stop - 1:,}"
        for owned in explanation.slices
    ]
    if len(lines) > _MOST_SLICES:
        lines[3:-2] = [f"... {len(lines) - 5} more ranks ..."]
    return [("slices" if number == 0 else "", line) for number, line in enumerate(lines)]


def brief_text(
    plan: Plan, cost: Cost, table: Table, verb: str = "train", *, color: bool, width: int = WIDTH
) -> str:
    """Return the lines about a plan that a run prints before its first step."""
    facts = dict(summary.facts(plan))
    memory = (
        f"{figures.size(cost.rest.total)} at rest, {figures.size(cost.peak.total)} at peak without "
        f"activations, {figures.size(cost.wire)} sent per step; of one rank"
    )
    rows = [
        ("model", f"{facts['model']}, {facts['parameters']}"),
        ("ranks", f"{facts['mesh']}, stage {plan.policy.sharding.stage}, {plan.policy.backend}"),
        *((label, facts[label]) for label in ("optimizer", "schedule") if label in facts),
        *_set_lines(table),
        ("cost", memory),
        *(("!", note) for note in plan.notes),
    ]
    ignored = plan.policy.ignored
    if len(ignored) > _MOST_IGNORED:
        names = listed(key for key, _ in ignored)
        rows.append(("!", f"{len(ignored)} keys are ignored, with --plan for reasons: {names}"))
    else:
        rows += [("!", f"`{key}` is ignored: {why}") for key, why in ignored]
    return render([title(verb, plan.digest, width), grid(rows, (10,), ("bold",), width)], color, width)


def _set_lines(table: Table) -> Iterable[tuple[str, str]]:
    """Yield a line for each of the first column sets."""
    sets = list(table.shown())
    for item in sets[:_MOST_SETS]:
        words = filter(None, (summary.kind(item.columns), summary.percent_of_elements(item, table)))
        lines = table.members(item)
        more = sum(line.count for line in lines) - lines[0].count
        names = lines[0].pattern + (f" and {more:,} more" if more else "")
        yield f"dtypes {item.letter}", f"{' '.join(words)}: {_dtypes(item.columns)}; {names}"
    if len(sets) > _MOST_SETS:
        yield "", f"and {len(sets) - _MOST_SETS:,} more sets, with --plan"


def _dtypes(columns: Columns) -> str:
    """Return the storage dtype, then other columns by dtype: `bf16, accumulate and state fp32`."""
    cells = {column: cell.rstrip("/") for column, cell in columns.cells().items()}
    by_dtype: dict[str, list[str]] = {}
    for column, cell in cells.items():
        by_dtype.setdefault(cell, []).append(column)
    most = cells["storage"]
    others = [f"{listed(names)} {cell}" for cell, names in by_dtype.items() if cell not in (most, "same")]
    return f"{most}, {'; '.join(others)}" if others else f"{most} in every column"
