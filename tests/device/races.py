"""Races of streams: accesses to the same memory that nothing orders.

Every stream has a vector clock. A launch advances the clock of its stream, an event keeps it, a wait takes
the maximum, and everything that is launched after the host has waited comes later. An access is checked
against the last write of its memory, a write also against the reads since, and memory that is allocated
counts as written.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

_OWN = {str(Path(__file__).with_name(name)) for name in ("copies.py", "races.py", "standin.py", "strict.py")}
"""Files whose frames no stack shows."""


class Race(AssertionError):  # noqa: N818 (a failed test, not an error of the code)
    """Two accesses that may happen in any order."""


@dataclass(frozen=True, slots=True)
class Access:
    """A range of addresses that a launch reads or writes."""

    start: int
    end: int
    writes: bool


@dataclass(frozen=True, slots=True)
class _Use:
    """An access that happened: when on which stream, by what, called where."""

    stream: int
    time: int
    name: str
    stack: tuple[tuple[CodeType, int], ...]


@dataclass(slots=True)
class _Cell:
    """Memory with one history."""

    end: int
    write: _Use | None = None
    reads: dict[int, _Use] = field(default_factory=dict)


Clock = dict[int, int]

HOST = -1
"""Stream number of the host's own accesses."""


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


@dataclass
class RaceChecker:
    """Clocks of all streams and events, and the last uses of all memory."""

    clocks: dict[int, Clock] = field(default_factory=dict)
    events: dict[tuple[int, int], Clock] = field(default_factory=dict)
    host: Clock = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    cells: dict[int, _Cell] = field(default_factory=dict)

    def record(self, event: tuple[int, int], stream: int) -> None:
        """Copy the clock of a stream to an event."""
        self.events[event] = dict(self._clock(stream))

    def wait(self, event: tuple[int, int], stream: int) -> None:
        """Let a stream wait for an event."""
        _join(self._clock(stream), self.events.get(event, {}))

    def host_waits(self, what: str, which: object) -> None:
        """Let the host wait for an event, a stream or the device."""
        if what == "event":
            _join(self.host, self.events.get(which, {}))  # type: ignore[call-overload]
        else:
            for stream, clock in self.clocks.items():
                if what == "device" or stream == which:
                    _join(self.host, clock)

    def launch(self, stream: int, name: str, accesses: Sequence[Access]) -> None:
        """Check the accesses of a launch: raise `Race` if an earlier access may happen after it."""
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        use = _Use(stream, clock[stream], name, stack())
        for access in accesses:
            self._access(access, use, clock)

    def allocate(self, stream: int, start: int, size: int) -> None:
        """Give memory to a stream; no other stream may use it."""
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        use = _Use(stream, clock[stream], "allocation", stack())
        self._access(Access(start, start + size, True), use, clock)

    def on_host(self, name: str, accesses: Sequence[Access]) -> None:
        """Check accesses of the host: before later launches, after those that it has waited for."""
        self.host[HOST] = self.host.get(HOST, 0) + 1
        use = _Use(HOST, self.host[HOST], name, stack())
        for access in accesses:
            self._access(access, use, self.host)

    def _clock(self, stream: int) -> Clock:
        clock = self.clocks.setdefault(stream, {})
        _join(clock, self.host)
        return clock

    def _access(self, access: Access, use: _Use, clock: Clock) -> None:
        first, last = self._cut(access.start), self._cut(access.end)
        inside = self.starts[first:last]
        for cell in map(self.cells.__getitem__, inside):
            earlier = [cell.write] if cell.write is not None else []
            if access.writes:
                earlier += cell.reads.values()
            for other in earlier:
                if clock.get(other.stream, 0) < other.time:
                    raise Race(_text(access, use, other, other is cell.write))
            if not access.writes:
                cell.reads[use.stream] = use
        if access.writes:
            for start in inside:
                del self.cells[start]
            self.starts[first:last] = [access.start]
            self.cells[access.start] = _Cell(access.end, use)
        else:
            self._fill(access, use, first)

    def _cut(self, at: int) -> int:
        """Begin a cell at an address inside of one; return the place of the first cell from there on."""
        place = bisect.bisect_left(self.starts, at)
        if place and (cell := self.cells[self.starts[place - 1]]).end > at:
            self.starts.insert(place, at)
            self.cells[at] = _Cell(cell.end, cell.write, dict(cell.reads))
            cell.end = at
        return place

    def _fill(self, access: Access, use: _Use, place: int) -> None:
        """Make cells where a read is the first access."""
        at = access.start
        while at < access.end:
            following = self.starts[place] if place < len(self.starts) else access.end
            if following > at:
                self.starts.insert(place, at)
                self.cells[at] = _Cell(min(following, access.end), None, {use.stream: use})
            at, place = self.cells[self.starts[place]].end, place + 1


def _text(access: Access, use: _Use, other: _Use, wrote: bool) -> str:
    verb, earlier = "writes" if access.writes else "reads", "wrote" if wrote else "read"
    what = f"`{use.name}` on {_place(use)} {verb} {access.end - access.start} bytes"
    before = f"that `{other.name}` {earlier} on {_place(other)}, and no event orders the two."
    later, before_it = lines(use.stack), lines(other.stack)
    return "\n  ".join([f"{what} {before}", "Later:", *later]) + "\n  ".join(["\nEarlier:", *before_it])


def _place(use: _Use) -> str:
    return "the host" if use.stream == HOST else f"stream {use.stream}"


def stack() -> tuple[tuple[CodeType, int], ...]:
    """Return code and line of the frames of our own code and of tests, innermost first."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 8:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file not in _OWN:
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def lines(frames: Sequence[tuple[CodeType, int]]) -> list[str]:
    return [f"{'/'.join(Path(code.co_filename).parts[-3:])}:{line} {code.co_name}" for code, line in frames]
