"""The order of a step in streams: recorded on the stand-in device, and in a simulation of the same plan.

Both are a list of collectives in the order of their beginnings, the computations of units, and for each pair
of the two whether the collective has ended before the computation begins, begins after it has ended, or may
go on beside it. On the device, the clocks of the race checker say so; in a simulation, the order of what it
plays.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from tests.device import standin
from tests.unit.test_simulate import cluster, work
from zerodrift.engine.native_executor import native
from zerodrift.inspect.simulate import simulation
from zerodrift.inspect.simulate.streams import RankPlayer, Streams
from zerodrift.pipeline import timeline
from zerodrift.pipeline.deferred import DeferredGradient, WeightQueue
from zerodrift.plan import Plan

Order = Literal["before", "beside", "after"]
Transfer = tuple[str, int]
"""Purpose and segment; the segment of the norm is -1."""
Computation = tuple[str, str, int]
"""`forward`, `backward` or `update`; the unit; and the number of earlier ones. The root has two of each."""


@dataclass
class Lanes:
    """The order of one step."""

    transfers: list[Transfer] = field(default_factory=list)
    computations: list[Computation] = field(default_factory=list)
    order: dict[tuple[int, Computation], Order] = field(default_factory=dict)
    """(number of a transfer, computation) -> the transfer's place."""

    def differences(self, other: Lanes) -> list[str]:
        """Return the differences between two orders."""
        if self.transfers != other.transfers:
            return [f"transfers: {self.transfers} and {other.transfers}"]
        if self.computations != other.computations:
            return [f"computations: {self.computations} and {other.computations}"]
        return [
            f"{self.transfers[number]}, transfer {number}, is {order} {computation}, or {there}"
            for (number, computation), order in self.order.items()
            if (there := other.order[number, computation]) != order
        ]


# --- simulated ------------------------------------------------------------------------------------------


class _PlayedStreams(Streams):
    """Streams that number the beginnings and ends of their work."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.moment = 0
        self.begun: list[tuple[Transfer, int]] = []
        self.ended: dict[float, int] = {}
        self.spans: list[tuple[tuple[str, str], int]] = []

    def wait(self, end: float, what: str, unit: str) -> None:
        self.moment += 1
        self.ended.setdefault(end, self.moment)
        super().wait(end, what, unit)


class _RecordedPlayer(RankPlayer):
    played: list[_RecordedPlayer] = []

    def __init__(self, plan: Plan, part: Plan, *rest: Any) -> None:
        super().__init__(plan, part, *rest)
        self.streams: _PlayedStreams = _PlayedStreams(self.streams.cluster)
        self.ends: list[float] = []
        self.is_embedding_alone = False
        self.played.append(self)

    def _send(self, call: Any) -> Any:
        transfer = super()._send(call)
        self.streams.moment += 1
        self.streams.begun.append(((call.purpose, call.segment), self.streams.moment))
        self.ends.append(transfer.end)
        return transfer

    def _run(self, work: Any, what: str, unit: str, kind: str = "B") -> Iterator[None]:
        if not self.is_embedding_alone:
            self.streams.moment += 1
            self.streams.spans.append(((what, unit), self.streams.moment))
        yield from super()._run(work, what, unit, kind)

    def _compute(self, event: Any, first: bool, last: bool, kind: str) -> Iterator[None]:
        # No product: its gradient is formed with those of inputs, and the simulation halves the time of both.
        self.is_embedding_alone = kind == "W" and event.work == "enter"
        if event.work == "update":
            self.streams.moment += 1
            self.streams.spans.append((("update", ""), self.streams.moment))
        yield from super()._compute(event, first, last, kind)

    def lanes(self) -> Lanes:
        found, seen = Lanes([transfer for transfer, _ in self.streams.begun]), Counter[tuple[str, str]]()
        for what, moment in self.streams.spans:
            computation = (*what, seen[what])
            seen[what] += 1
            found.computations.append(computation)
            for number, (_, begun) in enumerate(self.streams.begun):
                ended = self.streams.ended[self.ends[number]]
                place: Order = "after" if begun > moment else "before" if ended < moment else "beside"
                found.order[number, computation] = place
        return found


def simulated(plan: Plan) -> list[Lanes]:
    """Simulate a step on each stage of a pipeline, or on the one that there is. How long anything takes
    changes no order."""
    _RecordedPlayer.played = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "RankPlayer", _RecordedPlayer)
        simulation.simulate(plan, work(plan), cluster(), timeline=timeline(plan))
    return [player.lanes() for player in _RecordedPlayer.played]


# --- recorded -------------------------------------------------------------------------------------------


@dataclass
class _Launched:
    """A launch's time: its number on its stream, and the last number of each stream before it."""

    stream: int
    clock: dict[int, int]

    @property
    def time(self) -> int:
        return self.clock[self.stream]

    def is_behind(self, other: _Launched) -> bool:
        return self.clock.get(other.stream, 0) >= other.time


class Recorder:
    """A record of the launches of an engine's step on the stand-in device.

    Each part of the step is in a `phase`: `forward`, `backward`, `step`, or a pipeline's `schedule`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._main = engine, torch.accelerator.current_stream().stream_id
        self._executor = native(engine.executor)
        self._segments = self._executor.segments
        self._units = {number: unit.name for unit in self._executor.part.units for number in unit.segments}
        for segment in self._segments:
            segment._frees = max(segment._frees, 4)  # checks of the first ones read what no plan lists
        self._entered, self._transfer = "", -1
        self._formed: str | None = None
        """Unit of the late weight gradient that is being formed."""
        self._transfers: list[Transfer] = []
        self._of_transfer: dict[int, list[_Launched]] = defaultdict(list)
        self._groups: list[tuple[tuple[str, str], int, list[_Launched]]] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        comm, device = self._engine.comm, standin.device
        launch, form = device.launch, WeightQueue._form
        names = ("start_all_gather", "start_reduce_scatter", "all_reduce")
        calls = {name: getattr(comm, name) for name in names}

        def launched(stream: int, name: str, accesses: Any, start: Any) -> None:
            launch(stream, name, accesses, start)
            self._add(_Launched(stream, dict(device.races.clocks[stream])), name, accesses)

        def formed(queue: WeightQueue, late: DeferredGradient) -> None:
            name = queue._names[late.parameter]
            inner = (unit for unit in self._units.values() if unit and name.startswith(f"{unit}."))
            self._formed = next(inner, "")
            form(queue, late)
            self._formed = None

        device.launch = launched  # type: ignore[method-assign]
        for name, call in calls.items():
            setattr(comm, name, self._begins(name, call))
        try:
            with mock.patch.object(WeightQueue, "_form", formed):
                yield
        finally:
            del device.launch
            for name in names:
                delattr(comm, name)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._entered = name
        self._actions.clear()  # of the step before
        self._groups.append(((name, "-"), 0, []))  # a unit that comes again is another computation
        yield
        self._entered = ""

    @property
    def _actions(self) -> list[Any]:
        """The actions of a pipeline's schedule until now."""
        return getattr(self._executor, "actions", []) if self._entered == "schedule" else []

    @property
    def _phase(self) -> str:
        if self._entered != "schedule":
            return self._entered
        return "backward" if self._actions and self._actions[-1].kind != "F" else "forward"

    def _begins(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def begun(out: torch.Tensor, values: torch.Tensor, axis: str, *rest: Any, **more: Any) -> Any:
            if self._transfer >= 0:
                return call(out, values, axis, *rest, **more)
            self._transfer = len(self._transfers)
            named = (re.search(r"segment (\d+)$", text) for text in rest if isinstance(text, str))
            number = next((int(found[1]) for found in named if found is not None), -1)
            self._transfers.append((self._purpose(name, number), number))
            try:
                return call(out, values, axis, *rest, **more)
            finally:
                self._transfer = -1

        return begun

    def _purpose(self, name: str, number: int) -> str:
        if name == "start_all_gather":
            return "update" if self._phase == "step" else self._phase
        if name == "start_reduce_scatter":
            return "reduce"
        return "norm" if number < 0 else "replicate"

    def _add(self, launched: _Launched, name: str, accesses: Any) -> None:
        if self._transfer >= 0:
            self._of_transfer[self._transfer].append(launched)
        elif launched.stream == self._main and (unit := self._unit(name, accesses)) is not None:
            what = ("update" if self._phase == "step" else self._phase, unit)
            group = (what, len(self._actions))
            # A backward that forms its late gradients itself is one computation of each unit.
            same = [each for each in self._groups if each[:2] == group] if self._formed is not None else []
            if not same and self._groups[-1][:2] != group:
                self._groups.append((*group, []))
            (same or self._groups)[-1][2].append(launched)

    def _unit(self, name: str, accesses: Any) -> str | None:
        """Return the unit whose values a launch reads, or in the step writes."""
        if self._phase not in ("forward", "backward", "step"):
            return None
        if self._formed is not None:
            return self._formed
        if name.startswith("aten.embedding_dense_backward"):
            return ""
        is_step = self._phase == "step"
        for segment in self._segments:
            flat = segment.storage if is_step else segment.full
            if not flat.untyped_storage().nbytes():
                continue
            start, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
            if any(each.start < end and start < each.end and each.writes is is_step for each in accesses):
                return "" if is_step else self._units[segment.number]
        return None

    def lanes(self) -> Lanes:
        found, seen = Lanes(list(self._transfers)), Counter[tuple[str, str]]()
        for what, _, launches in self._groups:
            if not launches:
                continue
            computation = (*what, seen[what])
            seen[what] += 1
            found.computations.append(computation)
            for number in range(len(self._transfers)):
                moved = self._of_transfer[number]
                is_before = launches[0].is_behind(moved[-1])
                is_after = moved[0].is_behind(launches[-1])
                place: Order = "before" if is_before else "after" if is_after else "beside"
                found.order[number, computation] = place
        return found
