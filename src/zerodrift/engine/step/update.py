"""Update: step the owned slices, gather the new values on every rank, and report statistics of the update.

On a GPU the Triton programs and the definition in PyTorch may differ by an ulp ([Note: bits on a GPU] in
`optim/fused.py`), and ranks that hold the same weights would drift apart without an error. So programs run on
every rank or on none. On a CPU, and for an offloaded optimizer, both have the same bits.

Invariant: counts are integers and square sums are added as long integers (`kernels/squares.py`), so a report
is the same at every stage and for every number of slices.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from zerodrift.comm import Collectives, Handle
from zerodrift.dtypes import BLOCK
from zerodrift.engine.habits.storage_writes import mark_storage_changed, refresh_views
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.trained_segment import TrainedSegment
from zerodrift.errors import UnsupportedError
from zerodrift.kernels import device, squares
from zerodrift.optim import COLUMNS, UpdateFunction, Updater, reference_update, update
from zerodrift.plan import Plan, Row
from zerodrift.report import UpdateLine, UpdateReport

_log = logging.getLogger("zerodrift")


def update_segments(segments: Sequence[TrainedSegment], updater: Updater, multiplier: float) -> None:
    """Step every segment that has a gradient, times `multiplier`, and gather the new values."""
    updater.leave_alone([row.name for segment in segments for row in segment.rows_without_update])
    gradients: dict[int, torch.Tensor] = {}
    gathering = Handle()
    for segment in segments:
        if segment.reduced is not None and segment.update.axis:
            gradients[segment.number] = segment.reduced
        elif segment.reduced is not None:
            gradients[segment.number], following = segment.start_whole_gradient()
            gathering.wait()
            gathering = following
    gathering.wait()
    updater.update(gradients, multiplier)
    for segment in segments:
        if segment.number in gradients:
            segment.give_back(gradients[segment.number])
    showing = Handle()
    for segment in segments:
        if segment.number in gradients:
            following = segment.sync_storage(updater)
            showing.wait()
            showing = following
    showing.wait()
    for segment in segments:
        mark_storage_changed(segment)
        refresh_views(segment)


def choose_update_function(plan: Plan, comm: Collectives) -> UpdateFunction:
    """Return the function that steps slices, the same on all ranks; a call of all ranks. It is the definition
    in PyTorch if a rank has an obstacle to the programs, which is logged once."""
    where = comm.mesh.device
    if where.type == "cpu" or plan.policy.sharding.offload:
        return update
    obstacles = comm.all_gather_object(device.obstacle(where))
    without = {rank: why for rank, why in enumerate(obstacles) if why is not None}
    if not without:
        return update
    if comm.mesh.rank() == 0:
        _log.warning(
            "zerodrift: %s, on rank %s of %d; updates run in plain PyTorch everywhere, several times slower",
            "; ".join(dict.fromkeys(without.values())),
            ", ".join(str(rank) for rank in without),
            len(obstacles),
        )
    return reference_update


# --- statistics -------------------------------------------------------------------------------------------

COUNTS = COLUMNS.index("change_squares")
"""Columns before this one are counts, the others sums of squares."""

PLACES = squares.DIGITS + 1


def collect_statistics(
    plan: Plan, trained: Sequence[TrainedSegment], updater: Updater | None, comm: Collectives, step: int
) -> UpdateReport:
    """Add up the statistics of update `step` (`optim/updates.py`) per trained parameter, over all ranks."""
    if not plan.policy.statistics:
        must = "must be asked for in the config, so that updates record them"
        got = "`precision.statistics: false`"
        do = "Set `precision.statistics: true`."
        raise UnsupportedError("update_statistics", must, got=got, do=do)
    if updater is None or step == 0:
        raise UnsupportedError("update_statistics", "must follow an update", got="none yet")
    held = updater.statistics
    rows = [(segment, row) for segment in trained for row in segment.rows]
    sums = [_sums(segment, row, held[segment.number]) for segment, row in rows]
    table = torch.stack(sums) if sums else torch.zeros(0, COUNTS + 2 * PLACES, dtype=torch.int64)
    sharded = torch.tensor([bool(segment.update.axis) for segment, _ in rows])
    divided = torch.tensor([row.parts > 1 for _, row in rows])
    if comm.mesh.size("shard") > 1 and sharded.any():
        # The masters of all rows of a plan are sharded, or all are whole.
        table = comm.all_reduce_sum(table, "shard")
    elif divided.any():
        table[divided] = comm.all_reduce_sum(table[divided], "expert")
    lines = [_line(row, numbers) for (_, row), numbers in zip(rows, table.cpu(), strict=True)]
    order = {row.name: place for place, row in enumerate(plan.rows)}
    return UpdateReport(step, tuple(sorted(lines, key=lambda line: order[line.name])))


def _sums(segment: FlatSegment, row: Row, blocks: torch.Tensor) -> torch.Tensor:
    """Return this rank's sums for a row as integers: the counts, then the digits of each sum of squares."""
    span = row.within(segment.start_of(segment.owned), segment.owned.numel())
    mine = blocks[span.start // BLOCK : -(-span.stop // BLOCK)] if span.start < span.stop else blocks[:0]
    digits = [squares.digits(mine[:, column].contiguous()) for column in range(COUNTS, len(COLUMNS))]
    return torch.cat([mine[:, :COUNTS].sum(0).long(), *digits])


def _line(row: Row, numbers: torch.Tensor) -> UpdateLine:
    moved, unseen, lost, underflow = numbers[:COUNTS].tolist()
    change, weight = (math.sqrt(squares.total(part)) for part in numbers[COUNTS:].split(PLACES))
    return UpdateLine(row.name, row.whole_numel, moved, unseen, lost, underflow, change, weight)
