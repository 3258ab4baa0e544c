"""Plans, traces and update statistics as terminal text, an HTML page or JSON."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.report import as_json, figures, rows, summary, terminal
    from zerodrift.report.blocks import (
        BlockRow, ErrorBanner, FactList, NoteList, PageCell, PageHead, PageSection, PageTable, Paragraph,
        Preformatted, dtype_cell, page, table_section,
    )  # fmt: skip
    from zerodrift.report.charts import Chart, ChartLegend, Mark, Point, Series, chart, smoothing_steps
    from zerodrift.report.explanation import Explanation, explain, explain_row, matching
    from zerodrift.report.figures import elements, percent, significant, size
    from zerodrift.report.frame import (
        DIGEST_SHOWN, WIDTH, elide, fitted_table, grid, legible_text, markdown_text, pairs, render,
        report_width, section, sections_text, title,
    )  # fmt: skip
    from zerodrift.report.plan_html import plan_page, plan_sections
    from zerodrift.report.rows import group_rows, list_rows
    from zerodrift.report.support import support_markdown
    from zerodrift.report.terminal import brief_text, plan_text
    from zerodrift.report.trace import trace_text
    from zerodrift.report.updates import UpdateLine, UpdateReport

__getattr__, __dir__, __all__ = face(__name__)
