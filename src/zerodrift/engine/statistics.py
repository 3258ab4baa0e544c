"""What became of the last update, per parameter and over all ranks.

The update itself fills a few numbers per block of 256 elements (`optim/statistics.py`); this adds the blocks
of each parameter up, over the ranks that hold a slice of it. All ranks ask together.

Invariant: counts are integers and square sums are added as long integers (`kernels/squares.py`), so a report
does not depend on how parameters are cut: it is the same at every stage and for every number of slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zerodrift.comm.collectives import Collectives
from zerodrift.dtypes import BLOCK
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.trained import TrainedSegment
from zerodrift.errors import UnsupportedError
from zerodrift.kernels import squares
from zerodrift.optim.statistics import COLUMNS
from zerodrift.optim.updater import Updater
from zerodrift.plan.table import Plan, Row
from zerodrift.report.updates import UpdateLine, UpdateReport

COUNTS = COLUMNS.index("change_squares")
"""The columns before this one are counts, those from it on sums of squares."""

PLACES = squares.DIGITS + 1
"""Of one exact sum."""


def collect(
    plan: Plan, trained: Sequence[TrainedSegment], updater: Updater | None, comm: Collectives, step: int
) -> UpdateReport:
    """The update of step `step`, of every trained parameter. One collective per axis that masters are sharded
    on."""
    if not plan.policy.statistics:
        raise UnsupportedError(
            "update_statistics",
            "must be asked for in the config, so that updates record them",
            got="`precision.statistics: false`",
            do="Set `precision.statistics: true`.",
        )
    if updater is None or step == 0:
        raise UnsupportedError("update_statistics", "must follow an update", got="none yet")
    held = updater.statistics
    rows = [(segment, row) for segment in trained for row in segment.rows]
    sums = [_sums(segment, row, held[segment.number].blocks) for segment, row in rows]
    table = torch.stack(sums) if sums else torch.zeros(0, COUNTS + 2 * PLACES, dtype=torch.int64)
    sharded = torch.tensor([bool(segment.update.axis) for segment, _ in rows])
    divided = torch.tensor([row.parts > 1 for _, row in rows])
    if comm.mesh.size("shard") > 1 and sharded.any():
        # All rows of a plan have their masters alike, whole or sharded.
        table = comm.all_reduce_sum(table, "shard")
    elif divided.any():
        table[divided] = comm.all_reduce_sum(table[divided], "expert")
    lines = [_line(row, numbers) for (_, row), numbers in zip(rows, table.cpu(), strict=True)]
    order = {row.name: place for place, row in enumerate(plan.rows)}
    return UpdateReport(step, tuple(sorted(lines, key=lambda line: order[line.name])))


def _sums(segment: FlatSegment, row: Row, blocks: torch.Tensor) -> torch.Tensor:
    """This rank's part of a row as integers: the counts, then the digits of each sum of squares."""
    start = 0 if segment.owned.numel() == segment.spec.padded else segment.rank * segment.owned.numel()
    low = max(row.offset - start, 0)
    high = min(row.offset + row.numel - start, segment.owned.numel())
    mine = blocks[low // BLOCK : -(-high // BLOCK)] if low < high else blocks[:0]
    digits = [squares.digits(mine[:, column].contiguous()) for column in range(COUNTS, len(COLUMNS))]
    return torch.cat([mine[:, :COUNTS].sum(0).long(), *digits])


def _line(row: Row, numbers: torch.Tensor) -> UpdateLine:
    moved, unseen, lost, underflow = numbers[:COUNTS].tolist()
    change, weight = (math.sqrt(squares.total(part)) for part in numbers[COUNTS:].split(PLACES))
    return UpdateLine(row.name, row.whole_numel, moved, unseen, lost, underflow, change, weight)
