"""The order of collectives in one optimizer step, from the plan alone.

The engine issues them in this order and a test compares the two lists; `cost` adds up their bytes. An
operation is named by what it means: a `reduce_scatter` may be carried by an exchange and a local sum, it
still moves and sums what is said here.

One step of m micro-batches is: per micro-batch, gather each unit in order for the forward, again in
reverse order for the backward (unless it was kept), reduce each unit's gradient behind it; after the
last, sum over replicas; then the norm; then the update and what it must send. Units are gathered ahead
(`prefetch.py`), so their gathers come before what is computed with the one in front of them. `events` says
both, what is computed and what is sent, and `collectives` leaves out what is computed: there is one order.

What depends on data is not in it: the tokens that travel to their experts and back.

In a pipeline the forwards and backwards of several micro-batches are mixed; what `collectives` says is then
exact in number, and `scheduled` has its order for the actions of a schedule.

Invariant: nothing here depends on data, so all ranks of a stage issue the same list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from zerodrift.dtypes import DType
from zerodrift.plan.prefetch import gathered_bytes, reach, room
from zerodrift.plan.stages import of_piece, part, pieces, pieces_of, shared_with_another
from zerodrift.plan.table import Plan, Segment, Unit
from zerodrift.plan.timeline import Action

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


Work = Literal["enter", "forward", "leave", "backward", "update"]


@dataclass(frozen=True, slots=True)
class Computation:
    """What a rank computes between collectives, once what it needs has been gathered."""

    work: Work
    """Of a block `forward` and `backward`. Of the root what comes before its blocks is `enter`, behind them
    `leave`. `update` is the optimizer's."""
    unit: int
    """Index into `Plan.units`, of the rank's part in a pipeline; -1 for the update."""
    back: bool = False
    """Whether it is a backward."""


Event = Collective | Computation


def collectives(plan: Plan, stage: int = 0, micro_batches: int | None = None) -> Iterator[Collective]:
    """What the ranks of one place on the pipeline axis issue in one optimizer step, in order."""
    return (event for event in events(plan, stage, micro_batches) if isinstance(event, Collective))


def events(plan: Plan, stage: int = 0, micro_batches: int | None = None) -> Iterator[Event]:
    """The same with what is computed in between. A gather begins where it stands, and has ended before its
    unit is computed with; of reductions `cost.REDUCTIONS` are under way at once, and none when a backward has
    ended."""
    count = micro_batches or plan.policy.batch.accumulation
    plan = part(plan, stage)
    for turn in _turns(count):
        for _ in range(turn.times):
            yield from _micro_batch(plan, stage, turn)
    yield from afterwards(plan)


def counted(plan: Plan, stage: int, micro_batches: int) -> Iterator[tuple[Collective, int]]:
    """The same collectives, each with how often in a step: as many items for a million micro-batches as for
    three."""
    plan = part(plan, stage)
    for turn in _turns(micro_batches):
        if turn.times:
            yield from ((call, turn.times) for call in _sent(_micro_batch(plan, stage, turn)))
    yield from ((call, 1) for call in _sent(afterwards(plan)))


def _sent(events: Iterator[Event]) -> Iterator[Collective]:
    return (event for event in events if isinstance(event, Collective))


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


def afterwards(plan: Plan) -> Iterator[Event]:
    """What follows the last micro-batch; of a pipeline, `plan` is a rank's part."""
    units = list(plan.units)
    if plan.mesh.replicate > 1:
        for unit in reduce_order(units):
            yield from _over_replicas(plan, unit)
    for unit in units:
        yield from _over_ends(plan, unit)
    yield from _boundary(plan, units)


def _micro_batch(plan: Plan, stage: int, turn: _AlikeMicroBatches) -> Iterator[Event]:
    units = list(plan.units)
    keep = plan.policy.sharding.keep_gathered
    numbers = {unit.name: number for number, unit in enumerate(units)}
    if plan.policy.pipeline is not None and keep != "step":
        turns: tuple[Purpose, ...] = ("forward", "backward")
        for purpose in turns:
            for piece in pieces_of(plan, stage):
                for unit in of_piece(plan, piece):
                    yield from _gather(plan, unit, purpose)
    else:
        yield from _forward(plan, gathers=turn.first or keep != "step")
    # The root is gathered once: it is in use from the first op of a forward to the last of a backward.
    order = [unit for unit in backward_order(units) if unit.name] if keep == "never" else []
    needed_at = dict(zip((unit.name for unit in order), _reach(plan, order), strict=True))
    for first in order[:1]:
        yield from _gather(plan, first, "backward")
    yield from (Computation("leave", numbers[unit.name], back=True) for unit in units if not unit.name)
    gathered = len(order[:1])
    for unit in reduce_order(units):
        # A backward that has come to this unit has gathered it and, ahead, some after it.
        needed = needed_at.get(unit.name, 0)
        for other in order[gathered:needed]:
            yield from _gather(plan, other, "backward")
        gathered = max(gathered, needed)
        yield Computation("backward" if unit.name else "enter", numbers[unit.name], back=True)
        yield from _reduce(plan, unit, last=turn.last)


def _forward(plan: Plan, *, gathers: bool) -> Iterator[Event]:
    """Through the units in their order, some gathered ahead."""
    roots = [number for number, unit in enumerate(plan.units) if not unit.name]
    blocks = [number for number, unit in enumerate(plan.units) if unit.name]
    to_gather = [plan.units[number] for number in (*roots, *blocks)] if gathers else []
    gathered = 0
    ends = [len(roots) + end for end in _reach(plan, [plan.units[number] for number in blocks])]
    for place, number in enumerate((*roots, *blocks)):
        block = place >= len(roots)
        needed = ends[place - len(roots)] if block else place + 1
        for unit in to_gather[gathered:needed]:
            yield from _gather(plan, unit, "forward")
        gathered = max(gathered, needed)
        yield Computation("forward" if block else "enter", number)
    yield from (Computation("leave", number) for number in roots)


def _reach(plan: Plan, units: Sequence[Unit]) -> tuple[int, ...]:
    return reach([gathered_bytes(plan, unit) for unit in units], room(plan))


def scheduled(plan: Plan, stage: int, actions: Sequence[Action]) -> Iterator[tuple[Action, list[Event]]]:
    """In a pipeline: what a rank does in each action of its schedule, in their order. What of its gradients
    waits for the last micro-batch is reduced with the last action; `afterwards` follows.

    A piece is gathered around every forward and backward of its own, unless it stays for the whole step."""
    plan = part(plan, stage)
    mine = pieces_of(plan, stage)
    held = {piece: of_piece(plan, piece) for piece in mine}
    numbers = {unit.name: number for number, unit in enumerate(plan.units)}
    last = pieces(plan.policy.pipeline, plan.mesh) - 1
    uses = Counter(unit.name for units in held.values() for unit in units)
    ended: Counter[str] = Counter()
    keeps = plan.policy.sharding.keep_gathered == "step"
    for place, action in enumerate(actions):
        units, found = held[action.piece], list[Event]()
        purpose: Purpose = "forward" if action.kind == "F" else "backward"
        if keeps and place == 0:
            found += (call for unit in plan.units for call in _gather(plan, unit, "forward"))
        if not keeps and action.kind != "W":
            found += (call for unit in units for call in _gather(plan, unit, purpose))
        work: Work = "forward" if action.kind == "F" else "backward"
        blocks: list[tuple[Work, Unit]] = [(work, unit) for unit in units if unit.name]
        roots = [unit for unit in units if not unit.name]
        enters: list[tuple[Work, Unit]] = [("enter", unit) for unit in roots if action.piece == 0]
        leaves: list[tuple[Work, Unit]] = [("leave", unit) for unit in roots if action.piece == last]
        forth = [*enters, *blocks, *leaves]
        for work, unit in forth if action.kind == "F" else reversed(forth):
            found.append(Computation(work, numbers[unit.name], back=action.kind != "F"))
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


def _boundary(plan: Plan, units: list[Unit]) -> Iterator[Event]:
    """After the last micro-batch: the norm, then what the update sends."""
    trained = [(n, s) for unit in units for n, s in _segments(plan, unit) if s.trained]
    if trained and plan.mesh.shard > 1:
        yield Collective("all_reduce", "norm", DType.INT64, NORM_NUMEL, "shard", DType.INT64, -1)
    if plan.mesh.pipeline > 1:
        yield Collective("all_reduce", "norm", DType.INT64, NORM_NUMEL, "pipeline", DType.INT64, -1)
    sliced = [(number, segment) for number, segment in trained if plan.slices(segment) > 1]
    for number, segment in sliced:
        update = segment.columns.update
        if update is not None and not update.axis:
            # Every rank updates the whole parameter, so the reduced gradient goes to every rank.
            dtype = update.accumulate.dtype
            yield Collective("all_gather", "update", dtype, segment.padded, segment.axis, None, number)
    if trained:
        yield Computation("update", -1)
    for number, segment in sliced:
        update, storage = segment.columns.update, segment.columns.storage
        if update is not None and update.axis and not storage.axis:
            yield Collective(
                "all_gather", "update", storage.dtype, segment.padded, segment.axis, None, number
            )


def _segments(plan: Plan, unit: Unit) -> Iterator[tuple[int, Segment]]:
    for number in unit.segments:
        yield number, plan.segments[number]
