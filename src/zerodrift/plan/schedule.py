"""The order of collectives in one optimizer step, from the plan alone.

The engine issues them in this order and a test compares the two lists; `cost` adds up their bytes. An
operation is named by what it means: a `reduce_scatter` may be carried by an exchange and a local sum, it
still moves and sums what is said here.

One step of m micro-batches is: per micro-batch, gather each unit in order for the forward, again in
reverse order for the backward (unless it was kept), reduce each unit's gradient behind it; after the
last, sum over replicas; then the norm; then the update and what it must send. In a backward one unit is
gathered ahead, so its gather comes before the reduction of the unit that is being worked on.

What depends on data is not in it: the tokens that travel to their experts and back.

In a pipeline the forwards and backwards of several micro-batches are mixed; what is said here is then
exact in number, and the gathers and reductions of micro-batches come in the order of the pipeline's schedule.

Invariant: nothing here depends on data, so all ranks of a stage issue the same list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zerodrift.dtypes import DType
from zerodrift.plan.stages import of_piece, part, pieces_of, shared_with_another
from zerodrift.plan.table import Plan, Segment, Unit

Op = Literal["all_gather", "reduce_scatter", "all_reduce"]
Purpose = Literal["forward", "backward", "reduce", "replicate", "norm", "update"]

NORM_NUMEL = 48
"""An exact square sum in 44 digits of 32 bits, the count of blocks that are not finite, and what ranks must
agree on: whether somebody wrote to weights, a checksum of those, and one of the order in which units were
gathered. Integers, so that the sum over ranks has no rounding and no order."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as every rank of the axis issues it."""

    op: Op
    purpose: Purpose
    dtype: DType
    numel: int
    """Elements of the whole buffer: all slices together."""
    axis: Literal["shard", "replicate", "expert_shard", "pipeline", "ends"]
    sum: DType | None
    """The dtype of the sum, where there is one."""
    segment: int
    """Index into `Plan.segments`, of the rank's part in a pipeline; -1 for the norm."""


def collectives(plan: Plan, stage: int = 0, micro_batches: int | None = None) -> Iterator[Collective]:
    """What the ranks of one place on the pipeline axis issue in one optimizer step, in order."""
    count = micro_batches or plan.policy.batch.accumulation
    plan = part(plan, stage)
    for turn in _turns(count):
        for _ in range(turn.times):
            yield from _micro_batch(plan, stage, turn)
    yield from _afterwards(plan)


def counted(plan: Plan, stage: int, micro_batches: int) -> Iterator[tuple[Collective, int]]:
    """The same collectives, each with how often in a step: as many items for a million micro-batches as for
    three."""
    plan = part(plan, stage)
    for turn in _turns(micro_batches):
        if turn.times:
            yield from ((call, turn.times) for call in _micro_batch(plan, stage, turn))
    yield from ((call, 1) for call in _afterwards(plan))


@dataclass(frozen=True, slots=True)
class _AlikeMicroBatches:
    """Micro-batches that follow each other and are alike."""

    times: int
    first: bool
    last: bool


def _turns(count: int) -> tuple[_AlikeMicroBatches, ...]:
    """What a micro-batch issues depends on whether it is the first or the last of its step."""
    if count == 1:
        return (_AlikeMicroBatches(1, True, True),)
    return (
        _AlikeMicroBatches(1, True, False),
        _AlikeMicroBatches(count - 2, False, False),
        _AlikeMicroBatches(1, False, True),
    )


def _afterwards(plan: Plan) -> Iterator[Collective]:
    """What follows the last micro-batch."""
    units = list(plan.units)
    if plan.mesh.replicate > 1:
        for unit in reduce_order(units):
            yield from _over_replicas(plan, unit)
    for unit in units:
        yield from _over_ends(plan, unit)
    yield from _boundary(plan, units)


def _micro_batch(plan: Plan, stage: int, turn: _AlikeMicroBatches) -> Iterator[Collective]:
    units = list(plan.units)
    keep = plan.policy.sharding.keep_gathered
    if plan.policy.pipeline is not None and keep != "step":
        turns: tuple[Purpose, ...] = ("forward", "backward")
        for purpose in turns:
            for piece in pieces_of(plan, stage):
                for unit in of_piece(plan, piece):
                    yield from _gather(plan, unit, purpose)
    elif turn.first or keep != "step":
        for unit in units:
            yield from _gather(plan, unit, "forward")
    # The root is gathered once: it is in use from the first op of a forward to the last of a backward.
    order = [unit for unit in backward_order(units) if unit.name] if keep == "never" else []
    place = {unit.name: number for number, unit in enumerate(order)}
    gathered = 0
    for unit in reduce_order(units):
        # A backward that has come to this unit has gathered it and, ahead, the one after it.
        needed = min(place[unit.name] + 2, len(order)) if unit.name in place else 0
        for other in order[gathered:needed]:
            yield from _gather(plan, other, "backward")
        gathered = max(gathered, needed)
        yield from _reduce(plan, unit, last=turn.last)


def backward_order(units: list[Unit]) -> list[Unit]:
    """In which a backward comes to units: the reverse of a forward, but that a unit which holds others is
    come to before them, as in a forward."""
    inside: dict[str | None, list[Unit]] = {None: []}
    for unit in units:
        holder = next((path for path in _enclosing_modules(unit.name) if path in inside), None)
        inside[holder].append(unit)
        inside[unit.name] = []
    order: list[Unit] = []
    left = list(inside[None])
    while left:
        order.append(left.pop())
        left += inside[order[-1].name]
    return order


def _enclosing_modules(name: str) -> Iterator[str]:
    """The modules that a module is in, innermost first; the root is last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def reduce_order(units: list[Unit]) -> list[Unit]:
    """In which gradients are whole: blocks in reverse, the root last, when the backward ends."""
    return [*reversed([u for u in units if u.name]), *[u for u in units if not u.name]]


def holds(outer: Unit, inner: Unit) -> bool:
    """Whether the module of one unit is inside that of the other."""
    return outer.name == "" or inner.name.startswith(f"{outer.name}.")


def _gather(plan: Plan, unit: Unit, purpose: Purpose) -> Iterator[Collective]:
    for number, segment in _segments(plan, unit):
        if segment.columns.storage.axis and plan.slices(segment) > 1:
            dtype = segment.columns.gather
            yield Collective("all_gather", purpose, dtype, segment.padded, segment.axis, None, number)


def _reduce(plan: Plan, unit: Unit, *, last: bool) -> Iterator[Collective]:
    for number, segment in _segments(plan, unit):
        update = segment.columns.update
        if update is None or not (last or update.reduce.when == "every") or plan.slices(segment) == 1:
            continue
        wire, total = update.reduce.wire, update.reduce.sum
        yield Collective("reduce_scatter", "reduce", wire, segment.padded, segment.axis, total, number)


def _over_replicas(plan: Plan, unit: Unit) -> Iterator[Collective]:
    for number, segment in _segments(plan, unit):
        update = segment.columns.update
        if update is not None:
            numel = segment.padded // plan.slices(segment)
            wire, total = update.reduce.wire, update.reduce.sum
            yield Collective("all_reduce", "replicate", wire, numel, "replicate", total, number)


def _over_ends(plan: Plan, unit: Unit) -> Iterator[Collective]:
    """What is tied across the pipeline."""
    for number, segment in _segments(plan, unit):
        update = segment.columns.update
        if update is not None and shared_with_another(plan, segment):
            numel = segment.padded // plan.slices(segment)
            dtype = update.accumulate.dtype
            yield Collective("all_reduce", "reduce", dtype, numel, "ends", dtype, number)


def _boundary(plan: Plan, units: list[Unit]) -> Iterator[Collective]:
    """After the last micro-batch: the norm, then what the update sends."""
    trained = [(n, s) for unit in units for n, s in _segments(plan, unit) if s.trained]
    if trained and plan.mesh.shard > 1:
        yield Collective("all_reduce", "norm", DType.INT64, NORM_NUMEL, "shard", DType.INT64, -1)
    if plan.mesh.pipeline > 1:
        yield Collective("all_reduce", "norm", DType.INT64, NORM_NUMEL, "pipeline", DType.INT64, -1)
    for number, segment in trained:
        update, axis = segment.columns.update, segment.axis
        if update is None or plan.slices(segment) == 1:
            continue
        if not update.axis:
            # Every rank updates the whole parameter, so the reduced gradient goes to every rank.
            dtype = update.accumulate.dtype
            yield Collective("all_gather", "update", dtype, segment.padded, axis, None, number)
        elif not segment.columns.storage.axis:
            dtype = segment.columns.storage.dtype
            yield Collective("all_gather", "update", dtype, segment.padded, axis, None, number)


def _segments(plan: Plan, unit: Unit) -> Iterator[tuple[int, Segment]]:
    for number in unit.segments:
        yield number, plan.segments[number]
