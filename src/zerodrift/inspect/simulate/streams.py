"""Play the events of a step on the two streams of a rank: computation and the link.

Collectives travel one after the other, in the order in which the engine begins them. Computation overlaps
with a collective until it needs the result. `plan/schedule.py` has the order and the dependencies. All ranks
of one pipeline stage do the same, so only one of them is played.

Invariant: no time is counted twice. A step is the sum of computing, waiting for the link, and waiting for
other stages.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from zerodrift.dtypes import BLOCK
from zerodrift.inspect.simulate.cluster import (
    GIGA,
    MICRO,
    Cluster,
    all_to_all_seconds,
    axis_layout,
    collective_time,
)
from zerodrift.inspect.simulate.work import CountedOperation, UnitWork, Work
from zerodrift.plan import (
    REDUCTIONS,
    Collective,
    Computation,
    Event,
    Plan,
    Segment,
    block_bytes,
    count_moments,
    sums_bytes,
)
from zerodrift.policy import Master


@dataclass
class Streams:
    """The time of one rank, in seconds."""

    cluster: Cluster
    now: float = 0.0
    free: float = 0.0  # when the link is free
    computed: float = 0.0
    waited: dict[tuple[str, str], float] = field(default_factory=dict)
    """(unit, purpose) -> seconds in which nothing was computed."""
    idle: float = 0.0  # seconds in which the rank waits for another pipeline stage
    _busy: list[tuple[float, float]] = field(default_factory=list)

    def compute(self, seconds: float) -> None:
        """Compute for so many seconds of full speed. Transfers slow computation down."""
        if seconds <= 0:
            return
        start, beside, left = self.now, self.cluster.compute_beside_link, seconds
        for begins, ends in self._busy:
            if ends <= self.now:
                continue
            alone = max(0.0, begins - self.now)
            if left <= alone:
                break
            left -= alone
            self.now = max(self.now, begins)
            done = min(left, (ends - self.now) * beside)
            self.now = self.now + left / beside if done == left else ends
            left -= done
        self.now += left
        self._busy = [span for span in self._busy if span[1] > self.now]
        self.computed += self.now - start

    def send(self, seconds: float) -> float:
        """Begin a transfer and return its end."""
        start = max(self.now, self.free)
        self.free = start + seconds
        if seconds > 0:
            self._busy.append((start, self.free))
        return self.free

    def wait(self, end: float, what: str, unit: str) -> None:
        if end > self.now:
            self.waited[unit, what] = self.waited.get((unit, what), 0.0) + end - self.now
            self.now = end


@dataclass(slots=True)
class _Transfer:
    call: Collective
    end: float
    added: int  # bytes that adding up the received values reads and writes


class RankPlayer:
    """Plays one rank of a plan."""

    def __init__(self, plan: Plan, part: Plan, work: Work, cluster: Cluster, recompute: bool) -> None:
        """`part` is the rank's own part of the plan."""
        self.streams = Streams(cluster)
        self._plan, self._part, self._work, self._cluster = plan, part, work, cluster
        self._recompute = recompute
        # A piece of a pipeline waits for all its gathers before it computes.
        self._pipelined = plan.policy.pipeline is not None
        self._gathers: dict[int, _Transfer] = {}
        self._reductions: list[_Transfer] = []
        self._last_gathers: list[_Transfer] = []
        self._seconds: dict[int, tuple[Mapping[CountedOperation, int], float]] = {}

    def play(self, events: Iterable[Event], *, first: bool, last: bool) -> None:
        """Play the events of a micro-batch. `first` and `last` are its place in the step."""
        for _ in self.turns(events, first=first, last=last, kind="B"):
            pass

    def turns(self, events: Iterable[Event], *, first: bool, last: bool, kind: str) -> Iterator[None]:
        """Play events, and yield whenever tokens begin to travel to or from experts: `experts/turns.py` lets
        the other computation of a pair run then.

        `kind` is the part of a backward: the whole (`B`), of inputs (`I`) or of weights (`W`).
        """
        for event in events:
            if isinstance(event, Computation):
                yield from self._compute(event, first, last, kind)
            else:
                self._issue(event, first)

    def end(self) -> None:
        """Wait for the gathers of stored parameters that follow the update."""
        for transfer in self._last_gathers:
            self.streams.wait(transfer.end, "update", self._unit(transfer.call))
        self._last_gathers.clear()

    def _compute(self, event: Computation, first: bool, last: bool, kind: str) -> Iterator[None]:
        part = self._part
        if event.work == "update":
            self._pass_over(sum(_update_bytes(part, segment) for segment in part.segments))
            return
        unit = part.units[event.unit]
        outer = self._work.enter if event.work == "enter" else self._work.leave
        work = self._work.blocks[unit.name] if unit.name else outer
        for number in list(self._gathers) if self._pipelined else unit.segments:
            if (transfer := self._gathers.pop(number, None)) is not None:
                self.streams.wait(transfer.end, transfer.call.purpose, self._unit(transfer.call))
                self._pass_over(_cast_bytes(part.segments[number]))
        if not event.back:
            yield from self._run(work, "forward", unit.name)
            return
        if self._recompute and unit.name and kind != "W":
            yield from self._run(work, "recompute", unit.name)
        yield from self._run(work, "backward", unit.name, kind)
        if event.work == "leave" and not self._pipelined:
            return  # gradients of the root are accumulated when all of its backward has run
        for segment in (part.segments[number] for number in unit.segments):
            update, rate = segment.columns.update, self._cluster.device.new_gb_per_s
            is_freed = update is not None and part.policy.sharding.free_accumulator
            if first and is_freed and rate is not None:  # the last step freed the accumulator
                new = sums_bytes(part, segment, part.policy.batch.accumulation)
                self.streams.compute(new / (rate * GIGA))
            is_reduced = update is not None and (last or update.reduce.when == "every")
            if not is_reduced or part.slices(segment) <= 1:
                self._pass_over(_accumulate_bytes(segment, adds=not first or self._pipelined))

    def _run(self, work: UnitWork, what: str, unit: str, kind: str = "B") -> Iterator[None]:
        """Compute a unit part by part, with the exchanges of tokens between the parts."""
        parts, sizes = work.forward, (work.dispatched, work.combined)
        if what == "backward":
            parts, sizes = work.backward, (work.combined, work.dispatched)
        layout = axis_layout(self._plan.mesh, "expert")
        travels = layout.ranks > 1 and kind != "W"
        for part, size in itertools.zip_longest(parts, sizes if travels else (), fillvalue=None):
            if part is not None:
                self.streams.compute(self._seconds_of(part) * (1.0 if kind == "B" else 0.5))
            if size:
                end = self.streams.send(all_to_all_seconds(size, layout, self._cluster))
                yield
                self.streams.wait(end, "exchange", unit)

    def _seconds_of(self, operations: Mapping[CountedOperation, int]) -> float:
        known = self._seconds.get(id(operations))
        if known is None:
            cluster, device = self._cluster, self._cluster.device
            least, seconds = device.operation_us * MICRO, 0.0
            for one, count in operations.items():
                reached = cluster.peak(one.dtype) * device.tflops_reached if one.flops else 1.0
                products = one.flops / reached
                seconds += count * max(least, cluster.seconds_of_bytes(one.bytes), products)
            known = self._seconds[id(operations)] = operations, seconds
        return known[1]

    def _pass_over(self, count: int) -> None:
        if count:
            self.streams.compute(self._cluster.seconds_of_bytes(count))

    def _issue(self, call: Collective, first: bool) -> None:
        if call.purpose == "reduce" and call.op == "reduce_scatter":
            segment = self._part.segments[call.segment]
            update = segment.columns.update
            self.finish_reductions(REDUCTIONS - 1)
            if not self._pipelined:
                adds = not first and update is not None and not update.accumulate.axis
                self._pass_over(_accumulate_bytes(segment, adds=adds))
            self._pass_over(_wire_bytes(self._part, segment))
            self._reductions.append(self._send(call))
        elif call.purpose in ("forward", "backward"):
            self._gathers[call.segment] = self._send(call)
        else:
            self.finish_reductions()
            transfer = self._send(call)
            if call.purpose == "update" and call.sum is None:
                update = self._part.segments[call.segment].columns.update
                if update is not None and update.axis:  # only the next step needs the gathered storage
                    self._last_gathers.append(transfer)
                    return
            self._end(transfer)

    def _send(self, call: Collective) -> _Transfer:
        seconds, added = collective_time(call, self._part, self._cluster)
        return _Transfer(call, self.streams.send(seconds), added)

    def finish_reductions(self, leave: int = 0) -> None:
        """Wait for all reductions except the last `leave`."""
        while len(self._reductions) > leave:
            self._end(self._reductions.pop(0))

    def _end(self, transfer: _Transfer) -> None:
        self.streams.wait(transfer.end, transfer.call.purpose, self._unit(transfer.call))
        self._pass_over(transfer.added)

    def _unit(self, call: Collective) -> str:
        return "" if call.segment < 0 else self._part.units[self._part.segments[call.segment].unit].name


def run_in_turns(computations: Iterable[Iterator[None]]) -> None:
    """Run the computations in turns. A turn ends when tokens begin to travel to or from experts."""
    left = deque(computations)
    while left:
        computation = left.popleft()
        for _ in itertools.islice(computation, 1):
            left.append(computation)


def split_micro_batches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Yield the events of each micro-batch, then those after the last micro-batch."""
    found: list[Event] = []
    ended = False
    for event in events:
        if ended and (isinstance(event, Computation) or event.purpose != "reduce"):
            yield found
            found, ended = [], False
        found.append(event)
        ended = ended or (isinstance(event, Computation) and event.work == "enter" and event.back)
    yield found


def _cast_bytes(segment: Segment) -> int:
    """Bytes of the cast after a gather, if the compute dtype differs."""
    gather, compute = segment.columns.gather, segment.columns.compute
    return 0 if compute is gather else gather.nbytes(segment.padded) + segment.padded * compute.size


def _accumulate_bytes(segment: Segment, *, adds: bool) -> int:
    """Bytes of adding autograd's gradient to the accumulator, or of copying it unless `adds`."""
    update = segment.columns.update
    if update is None:
        return 0
    size = update.accumulate.dtype.size
    cast = 0 if update.grad is update.accumulate.dtype else update.grad.size + size
    return segment.numel * (cast + (3 if adds else 2) * size)


def _wire_bytes(plan: Plan, segment: Segment) -> int:
    """Bytes of the division and of the cast to the wire's dtype before a reduction."""
    update = segment.columns.update
    if update is None:
        return 0
    size, wire = update.accumulate.dtype.size, update.reduce.wire
    divided = 2 * size if plan.policy.averaging.before != 1.0 else 0
    cast = 0 if wire is update.accumulate.dtype else segment.padded * size + wire.nbytes(segment.padded)
    return segment.padded * divided + cast


def _update_bytes(plan: Plan, segment: Segment) -> int:
    """Bytes of the norm and of the optimizer's update of the rank's own slice."""
    columns, update = segment.columns, segment.columns.update
    if update is None:
        return 0
    owned = segment.padded // (plan.slices(segment) if update.axis else 1)
    master = {Master.FP32: 2 * 4 + columns.storage.dtype.size, Master.SPLIT: 2 * 2 + 2 * 2}
    values = master.get(update.master, 2 * columns.storage.dtype.size)
    count = count_moments(plan.policy.optimizer, update.optimizer)
    state = owned // BLOCK * block_bytes(update.state) * count * 2
    return owned * (2 * update.accumulate.dtype.size + values) + state
