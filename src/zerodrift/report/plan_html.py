"""The page of a plan. `summary` supplies its words, `rows` its lines, and `blocks` how they look.

The script of the page only filters lines and unfolds reasons, so a printed page is complete.
"""

from __future__ import annotations

from typing import Any

from zerodrift.plan import Cost, Plan, Timeline
from zerodrift.policy import COLUMNS
from zerodrift.report import blocks, figures, summary
from zerodrift.report.blocks import PageCell, PageSection, PageTable, Paragraph, StackedBar, dtype_cell
from zerodrift.report.frame import DIGEST_SHOWN
from zerodrift.report.rows import Table


def plan_page(plan: Plan, cost: Cost, table: Table, timeline: Timeline | None = None) -> str:
    """Build the page of a plan. `timeline` belongs to its pipeline, if it has one."""
    facts = [pair for pair in summary.facts(plan) if pair[0] != "model"]
    head = blocks.PageHead(plan.source, f"zerodrift plan {plan.digest[:DIGEST_SHOWN]}", facts=facts)
    sections = plan_sections(plan, cost, table, timeline)
    return blocks.page(f"zerodrift plan: {plan.source}", head, sections, plan.digest)


def plan_sections(
    plan: Plan, cost: Cost, table: Table, timeline: Timeline | None = None
) -> list[PageSection]:
    """Build all sections below the head of a plan. The script needs their ids, so use them once per page."""
    decided = [(item.key, item.value, item.why) for item in plan.policy.decisions]
    columns = [_table(table), blocks.FactList(summary.marks(table, plan), "marks")]
    return [
        PageSection("", "", [blocks.NoteList(plan.notes)] if plan.notes else ()),
        PageSection("Columns", "columns", columns),
        _pipeline(plan, timeline),
        _memory(plan, cost),
        _wire(cost),
        PageSection("Why", "why", _why(table)),
        _boundaries(plan, table),
        blocks.table_section("Decisions", "decisions", ("what", "is", "because"), decided),
        blocks.table_section("Ignored keys", "ignored", ("key", "because"), plan.policy.ignored),
        blocks.table_section("Buffers", "buffers", ("buffers", "because"), summary.buffers(plan)),
    ]


def _table(table: Table) -> PageTable:
    shared = []
    for item in table.sets:
        words, why = summary.describe_columns(item.columns), item.columns.reasons()
        cells = []
        for column, text in item.columns.cells().items():
            hover = "\n".join(filter(None, (f"{column}: {words[column]}", why.get(column))))
            cells.append(dtype_cell(text, text.replace("same", str(item.columns.storage.dtype)), hover))
        shared.append((item.letter, summary.kind(item.columns), cells))
    rows = []
    for line in table.lines:
        letter, kind, cells = shared[line.set]
        count = f" x{line.count}" if line.count > 1 else ""
        also = [f"= {name}" for name in line.also]
        name = PageCell(line.pattern, "name", count=count, badge=kind, below=also)
        size = figures.shape(line.shape), figures.elements(line.numel)
        style = " ".join(filter(None, ("line", *kind.split(", "))))
        rows.append(blocks.PageRow([PageCell(letter, "set"), name, *size, *cells], style, letter))
    heads = ("set", "parameter", "shape", "elements", *COLUMNS)
    return PageTable(heads, rows, "rows", filtered=True)


def _why(table: Table) -> list[PageTable]:
    """Build a table per column set: each column, its value and its reason. The script unfolds them."""
    tables = []
    for item in table.sets:
        words = summary.describe_columns(item.columns) | summary.options(item.columns)
        rows = [(PageCell(name, is_head=True), words[name], reason) for name, reason in item.columns.why]
        caption, badge = f"{item.letter} {summary.amount(item, table)}", summary.kind(item.columns)
        tables.append(PageTable((), rows, "why", caption=caption, badge=badge, id=f"why-{item.letter}"))
    return tables


def _memory(plan: Plan, cost: Cost) -> PageSection:
    most = max(cost.rest.total, cost.peak.total, 1)
    bars = [
        StackedBar("At rest, between steps", summary.rest_parts(cost), most, cost.parameters),
        StackedBar("At peak, in the middle of a backward", summary.peak_parts(cost), most, cost.parameters),
    ]
    words = Paragraph(f"Bytes of {summary.basis(plan, cost)}. Activations are not included.")
    padding = Paragraph(f"Padding {summary.padding(plan, cost)}.")
    return PageSection("Memory", "memory", [words, blocks.BlockRow(bars, "pair"), padding])


def _wire(cost: Cost) -> PageSection:
    if not cost.traffic:
        return PageSection("Wire", "wire", [Paragraph("Nothing is sent.", "")])
    most = max(line.bytes for line in cost.traffic) or 1
    rows: list[blocks.PageRow] = []
    for line in cost.traffic:
        sent = f"{line.count:,}", figures.size(line.bytes), PageCell(bar=line.bytes / most)
        rows.append(blocks.PageRow((line.op, line.purpose, dtype_cell(line.dtype), line.axis, *sent)))
    rows.append(blocks.PageRow(("total", "", "", "", "", figures.size(cost.wire), ""), "total"))
    heads = ("op", "purpose", "dtype", "axis", "count", "bytes", "")
    caption = "Sent by one rank per optimizer step, ring bytes"
    return PageSection("Wire", "wire", [PageTable(heads, rows, "wire", caption=caption)])


def _pipeline(plan: Plan, timeline: Timeline | None) -> PageSection:
    shown: list[Any] = []
    if plan.policy.pipeline is not None:
        shown.append(PageTable(("what", "is"), summary.pipeline_facts(plan, timeline)))
        shown.append(PageTable(summary.PIPELINE_HEADS, summary.pipeline_ranks(plan, timeline), figures=()))
    if timeline is not None:
        shown.append(PageTable(("place", "order"), summary.pipeline_order(timeline)))
        shown.append(Paragraph(summary.pipeline_legend(timeline)))
    return PageSection("Pipeline", "pipeline", shown)


def _boundaries(plan: Plan, table: Table) -> PageSection:
    if not table.boundaries:
        return PageSection("Boundaries", "boundaries", ())
    above, below = (
        [Paragraph(f"{text[0].upper()}{text[1:]}.")] if text else []
        for text in (summary.input_casts(plan), summary.embedding_casts(table))
    )
    rows = PageTable(summary.BOUNDARY_HEADS, summary.boundary_rows(table))
    return PageSection("Boundaries", "boundaries", [*above, rows, *below])
