"""A plan in a few lines for the screen of a run: its column sets, its cost and its notes.

Invariant: every column set has its own line or is counted in the last one.
"""

from __future__ import annotations

from collections.abc import Iterable

from zerodrift.errors import listed
from zerodrift.plan.cost import Cost
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Columns
from zerodrift.report import figures, summary
from zerodrift.report.frame import WIDTH, grid, render, title
from zerodrift.report.rows import Table

MOST = 5
"""Column sets that get a line."""


def brief_text(plan: Plan, cost: Cost, table: Table, verb: str, *, color: bool, width: int = WIDTH) -> str:
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
        *_sets(table),
        ("cost", memory),
        *(("!", note) for note in plan.notes),
        *(("!", f"`{key}` is ignored: {why}") for key, why in plan.policy.ignored),
    ]
    return render([title(verb, plan.digest, width), grid(rows, (10,), ("bold",), width)], color, width)


def _sets(table: Table) -> Iterable[tuple[str, str]]:
    """Yield a line for each of the first column sets."""
    sets = list(table.shown())
    for item in sets[:MOST]:
        words = filter(None, (summary.kind(item.columns), summary.percent_of_elements(item, table)))
        lines = table.members(item)
        more = sum(line.count for line in lines) - lines[0].count
        names = lines[0].pattern + (f" and {more:,} more" if more else "")
        yield f"dtypes {item.letter}", f"{' '.join(words)}: {_dtypes(item.columns)}; {names}"
    if len(sets) > MOST:
        yield "", f"and {len(sets) - MOST:,} more sets, with --plan"


def _dtypes(columns: Columns) -> str:
    """Return the storage dtype, then other columns by dtype: `bf16, accumulate and state fp32`."""
    cells = {column: cell.rstrip("/") for column, cell in columns.cells().items()}
    by_dtype: dict[str, list[str]] = {}
    for column, cell in cells.items():
        by_dtype.setdefault(cell, []).append(column)
    most = cells["storage"]
    others = [f"{listed(names)} {cell}" for cell, names in by_dtype.items() if cell not in (most, "same")]
    return f"{most}, {'; '.join(others)}" if others else f"{most} in every column"
