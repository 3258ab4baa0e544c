"""Which ranks wrote which elements of a parameter: a rule that follows from the plan of the save.

It is not what makes reading right: what a rank wrote is in its description. It says which descriptions to
open, so that a reader on any number of ranks opens those that it needs.

Invariant: for a plan that was executed, the ranks that are named hold all of the elements, and each some.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

from zerodrift.dtypes import BLOCK
from zerodrift.plan.stages import rank_of
from zerodrift.plan.table import Plan, Row, Segment


def holders(plan: Plan, name: str, start: int, stop: int) -> Iterator[int]:
    """World ranks that wrote some of the elements `[start, stop)` of a parameter; none of one that the plan
    does not have."""
    row = plan.row(name)
    if row is None or not row.numel:
        return
    stage = rank_of(plan.policy.pipeline, plan.mesh, plan.units[row.unit].stage)
    find = _of_dtensors if plan.policy.backend == "fsdp2" else _of_segments
    for rank in find(plan, row, start, stop):
        yield stage * plan.mesh.data + rank


def _of_dtensors(plan: Plan, row: Row, start: int, stop: int) -> Iterator[int]:
    """`fully_shard` cuts the first dimension; replicas divide what a rank has of a segment among them, so any
    of them may have some."""
    mesh = plan.mesh
    size = max(1, -(-row.shape[0] // mesh.shard) * math.prod(row.shape[1:]))
    for index in _indices(start, stop, size, mesh.shard):
        yield from range(index, mesh.data, mesh.shard)


def _of_segments(plan: Plan, row: Row, start: int, stop: int) -> Iterator[int]:
    mesh, segment = plan.mesh, plan.segments[row.segment]
    slices = plan.slices(segment)
    sliced = _is_sliced(segment)
    size = max(1, segment.padded // slices if sliced else segment.padded)
    copies = mesh.replicate * (1 if sliced else slices)
    cuts, blocks = range(copies), size // BLOCK

    def cut(copy: int) -> int:
        return BLOCK * (blocks * copy // copies)

    for part in _indices(start, stop, row.numel, row.parts):
        # In the segment of the ranks that have this part of the experts.
        low, high = (row.offset + min(max(at - part * row.numel, 0), row.numel) for at in (start, stop))
        for index in _indices(low, high, size, slices if sliced else 1):
            first, last = (min(max(at - index * size, 0), size) for at in (low, high))
            lowest = bisect.bisect_right(cuts, first, key=cut) - 1
            for copy in range(lowest, bisect.bisect_left(cuts, last, key=cut)):
                replica, place = (copy, index) if sliced else divmod(copy, slices)
                if cut(copy) < cut(copy + 1):
                    yield replica * mesh.shard + (place * mesh.expert + part if row.parts > 1 else place)


def _indices(start: int, stop: int, size: int, count: int) -> range:
    """Of `count` neighbours of one size, those that the elements lie in."""
    return range(start // size, min((stop - 1) // size + 1, count))


def _is_sliced(segment: Segment) -> bool:
    """Whether each rank owns a slice, and not all the whole."""
    update = segment.columns.update
    return bool(segment.columns.storage.axis if update is None else update.axis)
