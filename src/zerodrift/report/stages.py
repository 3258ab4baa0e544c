"""Text about a pipeline: its pieces per rank, its order and its bubble.

The order is a `Timeline` made from torch's schedule. Without torch it is left out.
"""

from __future__ import annotations

import re

from zerodrift.plan import (
    Plan,
    Timeline,
    activation_dtype,
    activation_width,
    crossings,
    part,
    pieces,
    pieces_of,
    stage_cost,
)
from zerodrift.report import figures
from zerodrift.report.rows import ranges

SHOWN = 60  # most actions of a rank that are written out

LEGEND = (
    "1F0: piece 1, forward of micro-batch 0; B a whole backward, I the gradient of the piece's input, W "
    "those of its weights"
)
PAIRED = "; with + in between, one computes while tokens of the other travel to experts"


def legend(timeline: Timeline) -> str:
    return LEGEND + (PAIRED if timeline.paired else "")


def facts(plan: Plan, timeline: Timeline | None) -> tuple[tuple[str, str], ...]:
    """Return (label, value) pairs about the whole pipeline."""
    pipeline = plan.policy.pipeline
    if pipeline is None:
        return ()
    count = plan.policy.batch.accumulation
    total = pieces(pipeline, plan.mesh)
    ranks, schedule = plan.mesh.pipeline, pipeline.schedule
    bubble = f"not computed for {count * total:,} forwards"
    if timeline is not None:
        units = "a forward, the gradient of an input and those of weights take one unit of time each"
        bubble = f"{figures.percent(timeline.bubble)} of the ranks' time, if {units} and messages none: "
        bubble += f"{timeline.length} units in all"
    return (
        ("schedule", f"{schedule}, {count} micro-batches through {total} pieces on {ranks} ranks"),
        ("travels", _travels(plan)),
        ("bubble", bubble),
        ("imbalance", _imbalance(plan)),
    )


def _imbalance(plan: Plan) -> str:
    """Compare the dearest piece with the mean. The bubble assumes that all pieces take equal time."""
    costs = [0] * pieces(plan.policy.pipeline, plan.mesh)
    for unit in plan.units:
        costs[unit.stage] += unit.products
    mean = sum(costs) / len(costs)
    if not mean:
        return "no piece has a matrix, so their cost is unknown"
    share = f"piece {costs.index(max(costs))} takes {max(costs) / mean:.2f} times the mean of all pieces"
    return f"{share}, by elements of matrices that a token uses; the bubble assumes equal pieces"


def _travels(plan: Plan) -> str:
    """Describe what is sent between pieces per token. The number of tokens is unknown before the run."""
    count, values, dtype = crossings(plan), activation_width(plan), activation_dtype(plan)
    over = f"{count} {'boundary' if count == 1 else 'boundaries'} between ranks"
    if values is None:
        known = "what the layers of the model pass on, which is not known before it runs"
        return f"over {over}, there and back per micro-batch: {known}"
    size, sent = figures.size(values * dtype.size), f"{values:,} values in {dtype}; not in the bill"
    return f"{size} per token over each of {over}, and as much back per micro-batch: {sent}"


def ranks(plan: Plan, timeline: Timeline | None) -> tuple[tuple[str, str, str, str, str, str], ...]:
    """Return one row per pipeline rank, in the order of HEADS. `alive` counts micro-batches in memory."""
    lines = []
    for rank in range(plan.mesh.pipeline):
        mine, bill = part(plan, rank), stage_cost(plan, rank, plan.policy.batch.accumulation)
        held = "-" if timeline is None else str(timeline.most_alive[rank])
        pieces = "; ".join(_piece(plan, piece) for piece in pieces_of(plan, rank))
        elements = figures.elements(sum(row.whole_numel for row in mine.rows))
        rest, peak = figures.size(bill.rest.total), figures.size(bill.peak.total)
        lines.append((f"rank {rank}", pieces, elements, rest, peak, held))
    return tuple(lines)


HEADS = ("place", "pieces", "elements", "at rest", "peak", "alive")  # headers of the rows of `ranks`


def _piece(plan: Plan, piece: int) -> str:
    """Describe the units of a piece: `0: root, model.layers.0-7`."""
    units = [unit for unit in plan.units if unit.stage == piece]
    words = ["root"] if any(not unit.name and unit.rows for unit in units) else []
    numbers: dict[str, list[int]] = {}
    for unit in units:
        head, number = re.fullmatch(r"(.*?)(\d*)", unit.name).groups()  # type: ignore[union-attr]
        numbers.setdefault(head, []).extend([int(number)] if number else [])
    words += [head + ranges(found) for head, found in numbers.items() if head or found]
    for segment in plan.segments:
        if piece in segment.copies:
            words += [name for index in segment.rows for name in plan.rows[index].names[1:]]
    return f"{piece}: {', '.join(words)}"


def order(timeline: Timeline) -> tuple[tuple[str, str], ...]:
    """Return (rank, its actions in order) pairs."""
    lines = []
    for number, actions in enumerate(timeline.ranks):
        more = len(actions) - SHOWN
        words = (f"{action}{'+' if action in timeline.paired else ' '}" for action in actions[:SHOWN])
        lines.append((f"rank {number}", "".join(words).strip() + (f" and {more} more" if more > 0 else "")))
    return tuple(lines)
