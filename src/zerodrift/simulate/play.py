"""Puts the events of a step on two streams of a rank: what is computed, and what travels.

Collectives travel one after the other, in the order in which the engine begins them; what is computed goes
on beside them until it needs what has not arrived. In which order things begin, and what waits for what, is
said by `plan/schedule.py`, which the engine is held to. All ranks of a place on the pipeline axis do the
same, so one of them is played.

Invariant: no time is counted twice: a step is what is computed, what is waited for, and the time in which
other stages of a pipeline let a rank wait.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from zerodrift.plan.cost import REDUCTIONS
from zerodrift.plan.schedule import Collective, Computation, Event
from zerodrift.plan.table import Plan, Segment
from zerodrift.simulate import passes
from zerodrift.simulate.carry import Carried, carried, line, to_all
from zerodrift.simulate.cluster import MICRO, Cluster
from zerodrift.simulate.work import CountedOperation, UnitWork, Work

Stream = Literal["compute", "link"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that takes time."""

    stream: Stream
    what: str
    """`forward`, `backward`, `recompute`, `update`; a collective's purpose; `exchange` of experts."""
    unit: str
    start: float
    end: float
    bytes: int = 0
    """Of the whole buffer that travels."""


@dataclass(slots=True)
class _UnderWay:
    call: Collective
    way: Carried
    end: float


@dataclass
class Streams:
    """One rank's time."""

    cluster: Cluster
    now: float = 0.0
    """When what is computed goes on."""
    free: float = 0.0
    """When the link is."""
    computed: float = 0.0
    waited: dict[tuple[str, str], float] = field(default_factory=dict)
    """(unit, purpose) -> seconds in which nothing was computed."""
    intervals: list[Interval] = field(default_factory=list)
    _busy: list[tuple[float, float]] = field(default_factory=list)
    """When the link is, from now on."""

    def compute(self, seconds: float, what: str, unit: str) -> None:
        """Beside what travels, at its pace."""
        if seconds <= 0:
            return
        start, beside = self.now, self.cluster.compute_beside_link
        left = seconds
        for begins, ends in self._busy:
            if ends <= self.now:
                continue
            alone = max(0.0, begins - self.now)
            if left <= alone:
                break
            left -= alone
            self.now = max(self.now, begins)
            done = (ends - self.now) * beside
            if left <= done:
                self.now += left / beside
                left = 0.0
                break
            left -= done
            self.now = ends
        self.now += left
        self._busy = [span for span in self._busy if span[1] > self.now]
        self.computed += self.now - start
        self.intervals.append(Interval("compute", what, unit, start, self.now))

    def send(self, seconds: float, what: str, unit: str, count: int = 0) -> float:
        """Begin, and say when it will have ended."""
        start = max(self.now, self.free)
        self.free = start + seconds
        if seconds > 0:
            self._busy.append((start, self.free))
            self.intervals.append(Interval("link", what, unit, start, self.free, count))
        return self.free

    def wait(self, end: float, what: str, unit: str) -> None:
        if end > self.now:
            self.waited[unit, what] = self.waited.get((unit, what), 0.0) + end - self.now
            self.now = end


class Player:
    """One rank of the plan on its streams."""

    def __init__(self, plan: Plan, part: Plan, work: Work, cluster: Cluster, recompute: bool) -> None:
        """`part` is what the rank has of the plan."""
        self.streams = Streams(cluster)
        self._plan, self._part, self._work, self._cluster = plan, part, work, cluster
        self._recompute = recompute
        self._together = plan.policy.pipeline is not None
        """Whether a piece waits for all its gathers before it computes."""
        self._gathers: dict[int, _UnderWay] = {}
        self._reductions: list[_UnderWay] = []
        self._last_gathers: list[_UnderWay] = []
        self._seconds: dict[int, tuple[Mapping[CountedOperation, int], float]] = {}

    def play(self, events: Iterable[Event], *, first: bool, last: bool, kind: str = "B") -> None:
        """Events of a micro-batch, the first or the last of its step or neither; `kind` is what its backward
        is of: all, inputs alone (`I`) or weights alone (`W`)."""
        for _ in self.turns(events, first=first, last=last, kind=kind):
            pass

    def turns(self, events: Iterable[Event], *, first: bool, last: bool, kind: str) -> Iterator[None]:
        """The same, to be gone on with: it stops where rows have begun to travel, as the engine does for
        another to go on (`experts/turns.py`)."""
        for event in events:
            if isinstance(event, Computation):
                yield from self._compute(event, first, last, kind)
            else:
                self._issue(event, first)

    def end_backward(self) -> None:
        """Nothing of a backward is under way any more."""
        self._finish(0)

    def end(self) -> None:
        for sent in self._last_gathers:
            self.streams.wait(sent.end, "update", self._unit(sent.call))
        self._last_gathers.clear()

    # --- what is computed -------------------------------------------------------------------------------

    def _compute(self, event: Computation, first: bool, last: bool, kind: str) -> Iterator[None]:
        if event.work == "update":
            count = sum(passes.updated(self._part, segment) for segment in self._part.segments)
            self._pass(count, "update", "")
            return
        unit = self._part.units[event.unit]
        work = self._of(event, unit.name)
        waits = list(self._gathers) if self._together else [n for n in unit.segments if n in self._gathers]
        for number in waits:
            sent = self._gathers.pop(number)
            self.streams.wait(sent.end, sent.call.purpose, self._unit(sent.call))
            self._pass(passes.gathered(self._part, self._part.segments[number]), sent.call.purpose, unit.name)
        if not event.back:
            yield from self._run(work, "forward", unit.name)
            return
        if self._recompute and unit.name and kind != "W":
            yield from self._run(work, "recompute", unit.name)
        yield from self._run(work, "backward", unit.name, kind)
        if event.work == "leave" and not self._together:
            return  # its gradients land when the whole root's do
        for number in unit.segments:
            segment = self._part.segments[number]
            if first:
                seconds = self._cluster.seconds_of_new(passes.taken(self._part, segment))
                self.streams.compute(seconds, "backward", unit.name)
            if not self._goes(segment, last):
                self._pass(passes.landed(segment, adds=not first or self._together), "backward", unit.name)

    def _of(self, event: Computation, name: str) -> UnitWork:
        if name:
            return self._work.blocks[name]
        return self._work.enter if event.work == "enter" else self._work.leave

    def _run(self, work: UnitWork, what: str, unit: str, kind: str = "B") -> Iterator[None]:
        """Part by part, with the rows that travel between them."""
        parts, sizes = work.forward, (work.dispatched, work.combined)
        if what == "backward":
            parts, sizes = work.backward, (work.combined, work.dispatched)
        ranks = line(self._plan.mesh, "expert")
        travel = ranks.ranks > 1 and kind != "W"
        for part, size in itertools.zip_longest(parts, sizes if travel else (), fillvalue=None):
            if part is not None:
                self.streams.compute(self._seconds_of(part) * (1.0 if kind == "B" else 0.5), what, unit)
            if size:
                end = self.streams.send(to_all(size, ranks, self._cluster), "exchange", unit, size)
                yield
                self.streams.wait(end, "exchange", unit)

    def _seconds_of(self, operations: Mapping[CountedOperation, int]) -> float:
        known = self._seconds.get(id(operations))
        if known is None:
            cluster, least = self._cluster, self._cluster.device.operation_us * MICRO
            seconds = sum(
                count
                * max(
                    least,
                    cluster.seconds_of_bytes(operation.bytes),
                    cluster.seconds_of_products(operation.flops, operation.dtype) if operation.flops else 0.0,
                )
                for operation, count in operations.items()
            )
            known = self._seconds[id(operations)] = operations, seconds
        return known[1]

    def _pass(self, count: int, what: str, unit: str) -> None:
        if count:
            self.streams.compute(self._cluster.seconds_of_bytes(count), what, unit)

    def _goes(self, segment: Segment, last: bool) -> bool:
        """Whether its gradient is reduced with this micro-batch."""
        update = segment.columns.update
        if update is None or self._part.slices(segment) == 1:
            return False
        return last or update.reduce.when == "every"

    # --- what travels -------------------------------------------------------------------------------------

    def _issue(self, call: Collective, first: bool) -> None:
        unit = self._unit(call)
        if call.purpose == "reduce" and call.op == "reduce_scatter":
            segment = self._part.segments[call.segment]
            self._finish(REDUCTIONS - 1)
            if not self._together:
                update = segment.columns.update
                waited = not first and update is not None and not update.accumulate.axis
                self._pass(passes.landed(segment, adds=waited), "backward", unit)
            self._pass(passes.sent(self._part, segment), "reduce", unit)
            self._reductions.append(self._send(call))
            return
        if call.purpose in ("forward", "backward"):
            self._gathers[call.segment] = self._send(call)
            return
        self._finish(0)
        sent = self._send(call)
        storage = call.purpose == "update" and call.sum is None and self._sends_storage(call)
        if storage:
            self._last_gathers.append(sent)
            return
        self._end(sent)

    def _sends_storage(self, call: Collective) -> bool:
        update = self._part.segments[call.segment].columns.update
        return update is not None and bool(update.axis)

    def _send(self, call: Collective) -> _UnderWay:
        way = carried(call, self._part, self._cluster)
        size = call.numel * call.dtype.size
        return _UnderWay(call, way, self.streams.send(way.seconds, call.purpose, self._unit(call), size))

    def _finish(self, leave: int) -> None:
        while len(self._reductions) > leave:
            self._end(self._reductions.pop(0))

    def _end(self, sent: _UnderWay) -> None:
        unit = self._unit(sent.call)
        self.streams.wait(sent.end, sent.call.purpose, unit)
        self._pass(sent.way.added, sent.call.purpose, unit)

    def _unit(self, call: Collective) -> str:
        if call.segment < 0:
            return ""
        return self._part.units[self._part.segments[call.segment].unit].name


def in_turns(computations: Iterable[Iterator[None]]) -> None:
    """Each goes on until rows of it travel, then the next."""
    left = deque(computations)
    while left:
        computation = left.popleft()
        for _ in itertools.islice(computation, 1):
            left.append(computation)


def micro_batches_of(events: Iterable[Event]) -> Iterator[list[Event]]:
    """The events of each micro-batch, and then what follows the last."""
    found: list[Event] = []
    ended = False
    for event in events:
        begins = isinstance(event, Collective) and event.purpose not in ("reduce",)
        begins = begins or isinstance(event, Computation)
        if ended and begins:
            yield found
            found, ended = [], False
        found.append(event)
        ended = ended or (isinstance(event, Computation) and event.work == "enter" and event.back)
    yield found
