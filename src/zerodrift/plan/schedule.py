"""The order of collectives in one optimizer step, from the plan alone.

The engine issues collectives in this order and a test compares the two lists; `cost` adds up the bytes. An
operation is named by its meaning: a `reduce_scatter` may be carried by an exchange and a local sum.

Units are gathered ahead by bytes, so that many small units hide a wait as well as one large unit. The unit
that runs and those gathered ahead share a budget: by default the size of the largest two neighbours, which
costs no memory at the peak. At least one unit is gathered ahead, whatever its size.

A pipeline mixes the forwards and backwards of several micro-batches. Then `collectives` is exact in number,
and `pipeline_events` has the order. Tokens that travel to their experts are not listed.

Invariant: nothing here depends on data, so all ranks of a stage issue the same list.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from zerodrift.dtypes import DType
from zerodrift.plan.boundaries import enclosing_modules
from zerodrift.plan.stages import Action, is_tied_across_ranks, part, pieces, pieces_of, units_of_piece
from zerodrift.plan.table import Plan, Segment, Unit
from zerodrift.policy import Update, When, assignment, micro_batches_of_rank

Op = Literal["all_gather", "reduce_scatter", "all_reduce"]
Purpose = Literal["forward", "backward", "reduce", "replicate", "norm", "update"]
Work = Literal["enter", "forward", "leave", "backward", "update"]

NORM_NUMEL = 48
"""Length of the norm's message: an exact square sum in 44 digits of 32 bits, the count of blocks that are not
finite, and three values that ranks must agree on (whether weights were written to, a checksum of the weights,
and a checksum of the order of gathers). Integers, so that the sum over ranks has no rounding and no order."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective as every rank of the axis issues it."""

    op: Op
    purpose: Purpose
    dtype: DType
    numel: int
    """Elements of the whole buffer, all slices together."""
    axis: Literal["shard", "replicate", "expert_shard", "secondary", "expert_secondary", "pipeline", "ends"]
    sum: DType | None
    segment: int
    """Index into `Plan.segments`, of the rank's part in a pipeline; -1 for the norm."""


@dataclass(frozen=True, slots=True)
class Computation:
    """Work of a rank between two collectives, on a unit that has been gathered."""

    work: Work
    """A block has `forward` and `backward`. The root has `enter` before its blocks and `leave` behind them.
    The optimizer has `update`."""
    unit: int
    """Index into `Plan.units`, of the rank's part in a pipeline; -1 for the update."""
    back: bool = False


Event = Collective | Computation


def collectives(plan: Plan, stage: int = 0, micro_batches: int | None = None) -> Iterator[Collective]:
    """List the collectives of one optimizer step in order, for the ranks of a pipeline stage."""
    return (event for event in events(plan, stage, micro_batches) if isinstance(event, Collective))


def events(plan: Plan, stage: int = 0, micro_batches: int | None = None) -> Iterator[Event]:
    """List the collectives of one optimizer step and the computations between them, in order.

    A gather begins at its place in the list and has ended before its unit computes. `cost.REDUCTIONS`
    reductions are under way at once, and none when a backward has ended.
    """
    for times, some in _repeated(plan, stage, micro_batches or plan.policy.batch.accumulation):
        for _ in range(times):
            yield from some


def count_collectives(plan: Plan, stage: int, micro_batches: int) -> Iterator[tuple[Collective, int]]:
    """List the collectives of a step, each with the number of its repetitions.

    A million micro-batches make a list as short as that of three.
    """
    for times, some in _repeated(plan, stage, micro_batches):
        yield from ((event, times) for event in some if isinstance(event, Collective))


def _repeated(plan: Plan, stage: int, count: int) -> Iterator[tuple[int, list[Event]]]:
    """List the events of a step by micro-batch, each list with the number of its repetitions."""
    plan = part(plan, stage)
    first, last = (1, True, count == 1), (int(count > 1), False, True)
    for times, is_first, is_last in (first, (max(0, count - 2), False, False), last):
        if times:
            yield times, list(_micro_batch(plan, stage, is_first, is_last))
    yield 1, list(step_end(plan))


def step_end(plan: Plan) -> Iterator[Event]:
    """List the events behind the last micro-batch. In a pipeline, `plan` is a rank's part.

    These are the sums over replicas and over parameters that are tied across the pipeline, the messages of
    the norm, the update, and the messages that the update sends.
    """
    units, mesh = list(plan.units), plan.mesh
    trained = [item for unit in units for item in _updates(plan, unit)]
    for number, segment, update in (
        item for unit in reduce_order(units) if mesh.replicate > 1 for item in _updates(plan, unit)
    ):
        numel = segment.padded // plan.slices(segment)
        wire, total = update.reduce.wire, update.reduce.sum
        yield Collective("all_reduce", "replicate", wire, numel, "replicate", total, number)
    for number, segment, update in trained:
        if is_tied_across_ranks(plan, segment):
            numel, dtype = segment.padded // plan.slices(segment), update.accumulate.dtype
            yield Collective("all_reduce", "reduce", dtype, numel, "ends", dtype, number)
    if trained and mesh.shard > 1:
        yield Collective("all_reduce", "norm", DType.INT64, NORM_NUMEL, "shard", DType.INT64, -1)
    if mesh.pipeline > 1:
        yield Collective("all_reduce", "norm", DType.INT64, NORM_NUMEL, "pipeline", DType.INT64, -1)
    sliced = [item for item in trained if plan.slices(item[1]) > 1]
    for number, segment, update in sliced:
        if not update.axis:  # every rank updates the whole parameter, so every rank needs the whole gradient
            dtype = update.accumulate.dtype
            yield Collective("all_gather", "update", dtype, segment.padded, segment.axis, None, number)
    if trained:
        yield Computation("update", -1)
    for number, segment, update in sliced:
        storage = segment.columns.storage
        if update.axis and not storage.axis:
            narrow = segment.columns.gather.format is not None
            dtype = segment.columns.gather if narrow else storage.dtype
            yield Collective("all_gather", "update", dtype, segment.padded, segment.axis, None, number)


def _micro_batch(plan: Plan, stage: int, first: bool, last: bool) -> Iterator[Event]:
    """List the events of a forward and a backward; `first` and `last` are True for those of a step."""
    keep, blocks = plan.policy.sharding.keep_gathered, plan.units[1:]
    if plan.policy.pipeline is not None and keep != "step":
        purposes: tuple[Purpose, ...] = ("forward", "backward")
        for purpose, piece in itertools.product(purposes, pieces_of(plan, stage)):
            for unit in units_of_piece(plan, piece):
                yield from _gather(plan, unit, purpose)
    else:
        forward: list[tuple[int, list[Event]]] = [(1, [Computation("enter", 0)])]
        for number, end in enumerate(_prefetch_ends(plan, blocks), 1):
            forward.append((1 + end, [Computation("forward", number)]))
        order = plan.units if first or keep != "step" else ()
        yield from _gather_ahead(plan, order, "forward", forward)
        yield Computation("leave", 0)
    # The root is gathered once: it is in use from the first op of a forward to the last of a backward.
    again = [unit for unit in backward_order(list(plan.units)) if unit.name] if keep == "never" else []
    needed_at = dict(zip((unit.name for unit in again), _prefetch_ends(plan, again), strict=True))
    numbers = {unit.name: number for number, unit in enumerate(plan.units)}
    backward: list[tuple[int, list[Event]]] = [(1, [Computation("leave", 0, back=True)])]
    for unit in reduce_order(list(plan.units)):
        work = Computation("backward" if unit.name else "enter", numbers[unit.name], back=True)
        backward.append((needed_at.get(unit.name, 0), [work, *_reduce(plan, unit, last=last)]))
    yield from _gather_ahead(plan, again, "backward", backward)


def _gather_ahead(
    plan: Plan, order: Sequence[Unit], purpose: Purpose, work: Sequence[tuple[int, list[Event]]]
) -> Iterator[Event]:
    """List the events of `work`, and before each the gathers that have to begin.

    `work` has pairs: the number of units of `order` that are gathered by then, and the events that follow.
    """
    gathered = 0
    for needed, found in work:
        for unit in order[gathered:needed]:
            yield from _gather(plan, unit, purpose)
        gathered = max(gathered, needed)
        yield from found


def pipeline_events(
    plan: Plan, stage: int, actions: Sequence[Action]
) -> Iterator[tuple[Action, list[Event]]]:
    """List the events of a rank of a pipeline for each action of its schedule; `step_end` follows.

    Gradients that wait for the last micro-batch are reduced with the last action. A piece is gathered around
    each of its forwards and backwards, unless it stays gathered for the whole step.
    """
    plan = part(plan, stage)
    units_of = {piece: units_of_piece(plan, piece) for piece in pieces_of(plan, stage)}
    numbers = {unit.name: number for number, unit in enumerate(plan.units)}
    last = pieces(plan.policy.pipeline, plan.mesh) - 1
    uses = Counter(unit.name for units in units_of.values() for unit in units)
    ended: Counter[str] = Counter()
    keeps = plan.policy.sharding.keep_gathered == "step"
    for place, action in enumerate(actions):
        units, found = units_of[action.piece], list[Event]()
        purpose: Literal["forward", "backward"] = "forward" if action.kind == "F" else "backward"
        if keeps and place == 0:
            found += (call for unit in plan.units for call in _gather(plan, unit, "forward"))
        if not keeps and action.kind != "W":
            found += (call for unit in units for call in _gather(plan, unit, purpose))
        back = action.kind != "F"
        forth = [Computation("enter", 0, back)] if action.piece == 0 else []
        forth += [Computation(purpose, numbers[unit.name], back) for unit in units if unit.name]
        forth += [Computation("leave", 0, back)] if action.piece == last else []
        found += reversed(forth) if back else forth
        if action.kind in ("B", "W"):
            ended.update(unit.name for unit in units)
            whole = [unit for unit in units if ended[unit.name] % uses[unit.name] == 0]
            for unit in reduce_order(whole):
                found += _reduce(plan, unit, last=False)
        if place == len(actions) - 1:
            for unit in reduce_order(list(plan.units)):
                every = set(_reduce(plan, unit, last=False))
                found += (call for call in _reduce(plan, unit, last=True) if call not in every)
        yield action, found


def backward_order(units: list[Unit]) -> list[Unit]:
    """Sort units as a backward reaches them: the reverse of a forward.

    Except that a unit which holds others is reached before them, as in a forward.
    """
    inside: dict[str | None, list[Unit]] = {None: []}
    for unit in units:
        around = [*enclosing_modules(unit.name), ""] if unit.name else []
        holder = next((path for path in around if path in inside), None)
        inside[holder].append(unit)
        inside[unit.name] = []
    order: list[Unit] = []
    left = list(inside[None])
    while left:
        order.append(left.pop())
        left += inside[order[-1].name]
    return order


def reduce_order(units: list[Unit]) -> list[Unit]:
    """Sort units as their gradients become whole: blocks in reverse, and the root when the backward ends."""
    return [*reversed([u for u in units if u.name]), *[u for u in units if not u.name]]


def contains(outer: Unit, inner: Unit) -> bool:
    """Return True if the module of one unit is inside the module of the other."""
    return outer.name == "" or inner.name.startswith(f"{outer.name}.")


def _gather(plan: Plan, unit: Unit, purpose: Purpose) -> Iterator[Collective]:
    for number in unit.segments:
        segment = plan.segments[number]
        columns, again = segment.columns, plan.secondary_axis(segment) if purpose == "backward" else None
        if columns.storage.axis and plan.slices(segment) > 1:
            dtype, axis = (columns.regather, again) if again else (columns.gather, segment.axis)
            yield Collective("all_gather", purpose, dtype, segment.padded, axis, None, number)


def _reduce(plan: Plan, unit: Unit, *, last: bool) -> Iterator[Collective]:
    for number, segment, update in _updates(plan, unit):
        if (last or update.reduce.when == "every") and plan.slices(segment) > 1:
            wire, total = update.reduce.wire, update.reduce.sum
            yield Collective("reduce_scatter", "reduce", wire, segment.padded, segment.axis, total, number)


def _updates(plan: Plan, unit: Unit) -> Iterator[tuple[int, Segment, Update]]:
    for number in unit.segments:
        segment = plan.segments[number]
        if segment.columns.update is not None:
            yield number, segment, segment.columns.update


# --- gathers ahead ----------------------------------------------------------------------------------


def gathered_bytes(plan: Plan, unit: Unit) -> int:
    """Count the bytes of a unit's unsharded copy, with its casts to the compute dtype."""
    total = 0
    for segment in (plan.segments[number] for number in unit.segments):
        columns = segment.columns
        if columns.storage.axis and plan.slices(segment) > 1:
            total += columns.gather.nbytes(segment.padded)
            total += segment.padded * columns.compute.size if columns.compute is not columns.gather else 0
        elif columns.storage.dtype is not columns.compute or columns.encodes:
            total += segment.padded * columns.compute.size
    return total


def prefetch_budget(plan: Plan) -> int:
    """Return the bytes that the unit that runs and the units gathered ahead may take together."""
    if plan.policy.sharding.prefetch:
        return plan.policy.sharding.prefetch
    sizes = [gathered_bytes(plan, unit) for unit in plan.units if unit.name]
    return max((sum(pair) for pair in itertools.pairwise(sizes)), default=0)


def prefetch_ends(sizes: Sequence[int], budget: int) -> tuple[int, ...]:
    """Return, for each unit of an order, the place behind the last unit that is gathered while it runs.

    `sizes` are the bytes of the units in that order.
    """
    places, end, held = [], 0, 0
    for place, size in enumerate(sizes):
        while end < len(sizes) and (end < place + 2 or held + sizes[end] <= budget):
            held += sizes[end]
            end += 1
        places.append(end)
        held -= size
    return tuple(places)


def most_gathered_bytes(sizes: Sequence[int], budget: int) -> int:
    """Return the most bytes of units that are gathered together in an order."""
    spans = enumerate(prefetch_ends(sizes, budget))
    return max((sum(sizes[first:end]) for first, end in spans), default=0)


def _prefetch_ends(plan: Plan, units: Sequence[Unit]) -> tuple[int, ...]:
    return prefetch_ends([gathered_bytes(plan, unit) for unit in units], prefetch_budget(plan))


# --- micro-batches of a rank ------------------------------------------------------------------------


def rank_micro_batches(plan: Plan, rank: int, micro_batches: int | None = None) -> tuple[int, ...]:
    """Return the numbers of a data rank's micro-batches, in its order: by the tree, else round robin.

    `micro_batches` is their number per step, by default the plan's. Each number belongs to one rank.
    """
    count = micro_batches or plan.policy.batch.accumulation
    if not plan.policy.tree:
        return tuple(range(rank, count * plan.mesh.data, plan.mesh.data))
    when = assignment(_reduce_times(plan), count, plan.mesh) or "last"
    return micro_batches_of_rank(when, count, plan.mesh, rank)


def sums_by_tree(plan: Plan, micro_batches: int) -> bool:
    """Return True if ranks with this many micro-batches each sum whole nodes of the tree."""
    return assignment(_reduce_times(plan), micro_batches, plan.mesh) is not None


def _reduce_times(plan: Plan) -> tuple[When, ...]:
    updates = [segment.columns.update for segment in plan.segments]
    return tuple(dict.fromkeys(update.reduce.when for update in updates if update is not None))
