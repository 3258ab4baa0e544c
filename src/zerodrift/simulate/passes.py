"""What the engine itself reads and writes around the collectives: casts, copies, the norm, the update.

Invariant: bytes of one rank, from the columns of a segment alone.
"""

from __future__ import annotations

from zerodrift.dtypes import BLOCK
from zerodrift.plan.cost import block_bytes, moments, sums_bytes
from zerodrift.plan.table import Plan, Segment
from zerodrift.policy.nouns import Master


def gathered(plan: Plan, segment: Segment) -> int:
    """After a gather: the cast, where compute is another dtype."""
    columns = segment.columns
    if columns.compute is columns.gather:
        return 0
    return segment.padded * (columns.gather.size + columns.compute.size)


def landed(segment: Segment, *, adds: bool) -> int:
    """From what autograd leaves to the accumulator, where earlier micro-batches may wait."""
    update = segment.columns.update
    if update is None:
        return 0
    size = update.accumulate.dtype.size
    cast = 0 if update.grad is update.accumulate.dtype else update.grad.size + size
    return segment.numel * (cast + (3 if adds else 2) * size)


def taken(plan: Plan, segment: Segment) -> int:
    """Memory of sums that the step before has given back."""
    if segment.columns.update is None or not plan.policy.sharding.free_accumulator:
        return 0
    return sums_bytes(plan, segment, plan.policy.batch.accumulation)


def sent(plan: Plan, segment: Segment) -> int:
    """Before a reduction: a division, and a cast to what travels."""
    update = segment.columns.update
    if update is None:
        return 0
    size, wire = update.accumulate.dtype.size, update.reduce.wire
    divided = 2 * size if plan.policy.averaging.before != 1.0 else 0
    return segment.padded * (divided + (0 if wire is update.accumulate.dtype else size + wire.size))


def updated(plan: Plan, segment: Segment) -> int:
    """The norm, and the update of what this rank owns."""
    columns, update = segment.columns, segment.columns.update
    if update is None:
        return 0
    owned = segment.padded // (plan.slices(segment) if update.axis else 1)
    gradient = update.accumulate.dtype.size
    master = {Master.FP32: 2 * 4 + columns.storage.dtype.size, Master.SPLIT: 2 * 2 + 2 * 2}
    values = master.get(update.master, 2 * columns.storage.dtype.size)
    count = moments(plan.policy.optimizer, update.optimizer)
    state = owned // BLOCK * block_bytes(update.state) * count * 2
    return owned * (2 * gradient + values) + state
