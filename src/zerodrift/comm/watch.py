"""Where each rank is among the collectives, and what ranks say that will wait for each other for ever.

Every collective of a group has a number and a few words, `all_gather of layers.1`, kept by a `CollectiveLog`.
A rank that has waited for a few seconds writes to the store of its group where it is, and reads where the
others are that wait, too. Where they wait in a circle, for one that has left, or in the same turn for another
thing, nobody can ever go on: then what happened is written to the store, connections are cut, and every rank
that waits raises it.

Invariant: nothing is sent, asked or raised while no rank waits for long; and a rank that computes, loads
data, compiles, or sits in a debugger is waited for, however long that takes.

[Note: what is certain] A rank writes again and again while it stays where it is, with a number that grows.
The one that judges wants to see all of a circle twice more at the places where it saw them first, so there
was a moment at which all of them waited there. A rank that writes nothing is busy, and those who wait for it
can go on once it is done.

[Note: other people's collectives] A rank may also wait in `torch.distributed.barrier()`, while another
evaluates alone. The thread looks where the main thread is. Nobody leaves a barrier before all have come, so a
rank in one waits for all that are not. In other calls, and in those of another engine, values may still be on
their way: they count after LONG, and both only where no rank of all is busy.

[Note: NCCL] There a wait does not hold up the host, so ranks are compared where the host waits for the
device, which is once per step, at the norm: a rank that runs ahead has started what the others have not. Two
calls of equal size in the same turn are not told apart by NCCL; the checksum that travels with the norm
does that.

[Note: cutting] `abort` of a group is what ends waits on NCCL; gloo has it, but it does nothing there (torch
2.13). What gloo does is to close all connections of a group when somebody has waited too long on one of
them, so here somebody waits, for a message that nobody sends, for a millisecond.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zerodrift.errors import Problem, RankError

INTERVAL = 0.5
"""Seconds between two looks."""
PATIENCE = 3.0
"""Seconds of a wait before anybody is asked."""
LONG = 30.0
"""The same, where nobody can say that nothing is on its way."""
KEPT = 64
"""Collectives of a group whose words are kept."""

EVERYWHERE = (
    "What uses the engine (a forward, a backward, `step`, an evaluation, `gathered`, `full_...`, a save) "
    "must be done on every rank, or on none."
)
"""What to do about it."""

_MADE = "zerodrift/watches"
_NOBODY_SENDS = (1 << 30) - 1
"""A tag below those of `collectives`."""
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_COMM = str(Path(__file__).parent) + os.sep


@dataclass(frozen=True, slots=True)
class StartedCollective:
    """One collective of a group."""

    trail: CollectiveLog
    number: int
    op: str
    what: str
    """The operation and what it is for, the same on every rank that takes part."""


class CollectiveLog:
    """The collectives of one group, as this rank has started them."""

    def __init__(self, ranks: range) -> None:
        self.ranks = ranks
        self.count = 0
        self.checksum = 0
        """Of all of them, in their order; below 2^32."""
        self._kept = [""] * KEPT

    def begin(self, op: str, of: str) -> StartedCollective:
        """The next one. `of` says what is moved, where that is the same on all ranks."""
        what = f"{op} of {of}" if of else op
        turn = StartedCollective(self, self.count, op, what)
        self._kept[self.count % KEPT] = what
        self.checksum = zlib.crc32(what.encode(), self.checksum)
        self.count += 1
        return turn

    def last(self) -> list[str]:
        """The words of those that were started last, oldest first."""
        kept = range(max(0, self.count - KEPT), self.count)
        return [self._kept[number % KEPT] for number in kept]


@dataclass(frozen=True, slots=True)
class WaitReport:
    """Where a rank waits, as others read it."""

    beat: int
    """Grows with every writing."""
    serial: str
    """Of the wait: another one has another."""
    what: str
    at: str
    """The line of the user's code."""
    group: str
    """Whose turn it waits in; "" for a call that is not of this mesh."""
    number: int
    needs: tuple[int, ...]
    """The ranks that must come where it is."""
    sure: bool
    """Whether only their coming is waited for, not what they send."""
    trails: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    """Of each group of the mesh: how many it has started, and the words of the last."""

    def started(self, group: str, number: int) -> str | None:
        """The words of a turn; "" where they are not kept, None where it has not come."""
        count, words = self.trails.get(group, (0, ()))
        if number >= count:
            return None
        back = count - number
        return words[-back] if back <= len(words) else ""

    @classmethod
    def read(cls, text: bytes) -> WaitReport:
        values = json.loads(text)
        trails = {group: (count, tuple(words)) for group, (count, words) in values.pop("trails").items()}
        return cls(needs=tuple(values.pop("needs")), trails=trails, **values)

    def write(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


class _Wait:
    """The context of `DeadlockWatch.at`: a class, because a step has hundreds."""

    __slots__ = ("_before", "_watch", "serial", "since", "thread", "turn")

    def __init__(self, watch: DeadlockWatch, turn: StartedCollective, serial: int) -> None:
        self._watch, self.turn, self.serial = watch, turn, serial

    def __enter__(self) -> None:
        watch = self._watch
        if watch.said:
            raise RankError.relayed(watch.said)
        self.since, self.thread = time.monotonic(), threading.get_ident()
        self._before, watch._waits = watch._waits, self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        watch = self._watch
        try:
            if error is not None:
                watch.explain(self.turn, error)
        finally:
            watch._waits = self._before
        if error is None and watch.said:
            raise RankError.relayed(watch.said)


class DeadlockWatch:
    """Of one mesh, on one rank. Every rank makes one, each before any makes another."""

    def __init__(
        self, rank: int, trails: Iterable[CollectiveLog], groups: Sequence[Any], device: str
    ) -> None:
        """`groups` are those to cut; the first holds all ranks of the mesh, and its store is written to."""
        self.said = ""
        """What happened; empty as long as nothing has."""
        self._rank = rank
        self._trails = {str(trail.ranks): trail for trail in trails}
        self._groups, self._device = tuple(groups), device
        self._waits: _Wait | None = None
        self._serials = itertools.count()
        self._over = threading.Event()
        self._process = os.getpid()
        # torch's stubs do not know all that a store can do.
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._world = 1
        if groups:
            self._world = groups[0].size()
            self._store = groups[0].get_group_store()
            # A launcher may keep a store longer than a mesh lasts: each has keys of its own.
            self._key = f"zerodrift/watch/{(self._store.add(_MADE, 1) - 1) // self._world}"
            judge = _DeadlockDetector(rank, self._world, self._key, self._store.clone())
            self._thread = threading.Thread(
                target=self._look, args=(judge,), name="zerodrift-watch", daemon=True
            )
            self._thread.start()

    def at(self, turn: StartedCollective) -> _Wait:
        """A context: this rank is in that collective. What ends it because ranks wait for ever, says so."""
        return _Wait(self, turn, next(self._serials))

    def explain(self, turn: StartedCollective, error: BaseException) -> None:
        """Raise what is known of why a collective has ended with an error; where nothing is, tell others."""
        if not isinstance(error, (RuntimeError, RankError)):
            return
        said = self._heard() or self._missed(turn)
        if said and said != str(error):
            raise RankError.relayed(said) from error
        if isinstance(error, RankError) and not said:
            self._tell(str(error))

    def stop(self) -> None:
        """This rank leaves: whoever waits for it is told, when it asks."""
        if self._process != os.getpid() or self._over.is_set():
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5 * INTERVAL)
        if self._store is not None and not self.said:
            with contextlib.suppress(RuntimeError):  # the rank that had it may have left before
                self._store.set(f"{self._key}/left/{self._rank}", "left")
        # gloo's threads are waited for when the last reference to a group goes.
        self._groups, self._store, self._thread = (), None, None

    def _heard(self) -> str:
        if not self.said and self._store is not None:
            self.said = _read(self._store, f"{self._key}/said").decode()
        return self.said

    def _tell(self, missing: str) -> None:
        """To ranks that wait for this one, or will: it leaves because of another, which they may not miss."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # it was the store's rank
                self._store.compare_set(f"{self._key}/said", "", missing)

    def _missed(self, turn: StartedCollective) -> str:
        """What is to be said of a collective that failed, where others of its ranks have left."""
        if self._store is None:
            return ""
        gone = [rank for rank in turn.trail.ranks if _read(self._store, f"{self._key}/left/{rank}")]
        return message({}, gone, f"{_ranks([self._rank])} in {turn.what}") if gone else ""

    # --- the thread -------------------------------------------------------------------------------------

    def _look(self, judge: _DeadlockDetector) -> None:
        call: tuple[_Call, float] | None = None
        for beat in itertools.count():
            if self._over.wait(INTERVAL):
                return
            now, wait = time.monotonic(), self._waits
            if wait is not None:
                call = None
                if now - wait.since < PATIENCE:
                    continue
                place = self._place(beat, wait)
            else:
                current = _call()
                if current is None or call is None or current.key != call[0].key:
                    call = None if current is None else (current, now)
                    continue
                if now - call[1] < (PATIENCE if current.sure else LONG):
                    continue
                place = self._elsewhere(beat, call[0])
            try:
                said = judge.hear(place)
            except RuntimeError:
                return  # the store has gone with the rank that had it, and with it that rank's connections
            if said:
                self.said = said
                cut(self._groups, self._device)
                return

    def _place(self, beat: int, wait: _Wait) -> WaitReport:
        turn = wait.turn
        needs = tuple(rank for rank in turn.trail.ranks if rank != self._rank)
        at = _user_line(sys._current_frames().get(wait.thread))
        group = str(turn.trail.ranks)
        serial = f"turn {wait.serial}"
        return WaitReport(beat, serial, turn.what, at, group, turn.number, needs, True, self._logs_as_json())

    def _elsewhere(self, beat: int, call: _Call) -> WaitReport:
        needs = tuple(rank for rank in call.ranks or range(self._world) if rank != self._rank)
        return WaitReport(
            beat, f"call {call.key}", call.name, call.at, "", 0, needs, call.sure, self._logs_as_json()
        )

    def _logs_as_json(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        return {group: (trail.count, tuple(trail.last())) for group, trail in self._trails.items()}


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of torch.distributed, or a collective of another mesh, that the main thread is in."""

    key: tuple[int, int]
    name: str
    at: str
    ranks: tuple[int, ...]
    """Of its group; empty where that is not known."""
    sure: bool
    """Whether nobody leaves it before all have come: a barrier."""


class _DeadlockDetector:
    """Reads where the others are, round by round."""

    def __init__(self, rank: int, world: int, key: str, store: Any) -> None:
        self._rank, self._world, self._key, self._store = rank, world, key, store
        self._beats: dict[int, tuple[int, int]] = {}
        """Rank -> its last beat, and in how many rounds it has not moved since."""
        self._first: dict[int, tuple[str, int]] = {}
        """Of the circle that was found in the last round: where each was, and its beat at first."""

    def hear(self, place: WaitReport) -> str:
        """Say where this rank is; what was found, by any rank, or ""."""
        self._store.set(f"{self._key}/{self._rank}", place.write())
        said = _read(self._store, f"{self._key}/said")
        if said:
            return said.decode()
        if any(self._fresh(rank) is not None for rank in range(self._rank)):
            self._first = {}
            return ""  # the first of those who wait, looks
        places = {self._rank: place}
        for rank in range(self._rank + 1, self._world):
            report = self._fresh(rank)
            if report is not None:
                places[rank] = report
        silent = [rank for rank in range(self._world) if rank not in places]
        left = [rank for rank in silent if _read(self._store, f"{self._key}/left/{rank}")]
        lost = stuck(places, left, self._world)
        now = {rank: (places[rank].serial, places[rank].beat) for rank in lost}
        if {rank: serial for rank, (serial, _) in now.items()} != {
            rank: serial for rank, (serial, _) in self._first.items()
        }:
            self._first = now
        # See [Note: what is certain].
        if not lost or any(beat < self._first[rank][1] + 2 for rank, (_, beat) in now.items()):
            return ""
        text = message({rank: places[rank] for rank in lost}, left)
        return str(self._store.compare_set(f"{self._key}/said", "", text).decode())

    def _fresh(self, rank: int) -> WaitReport | None:
        """Where another rank waits, if it has said so lately."""
        text = _read(self._store, f"{self._key}/{rank}")
        if not text:
            return None
        place = WaitReport.read(text)
        beat, rounds = self._beats.get(rank, (place.beat, 0))
        rounds = rounds + 1 if beat == place.beat else 0
        self._beats[rank] = (place.beat, rounds)
        return place if rounds < 4 else None


def stuck(places: Mapping[int, WaitReport], left: Sequence[int], world: int) -> list[int]:
    """The ranks that can never go on. Those without a place that have not left are busy, and will."""
    go_on = set(range(world)) - set(places) - set(left)
    if go_on:
        # See [Note: other people's collectives].
        go_on |= {rank for rank, place in places.items() if not place.group}
    while True:
        more = {
            rank
            for rank, place in places.items()
            if rank not in go_on and all(_may_come(rank, other, places, go_on) for other in place.needs)
        }
        if not more:
            return sorted(set(places) - go_on)
        go_on |= more


def _may_come(rank: int, other: int, places: Mapping[int, WaitReport], go_on: set[int]) -> bool:
    """Whether another rank has come, or may come, where this one waits."""
    here, there = places[rank], places.get(other)
    if other in go_on:
        return True
    if there is None:
        return False  # it has left
    if here.group:
        words = there.started(here.group, here.number)
        return words is not None and words in ("", here.what)
    return not there.group  # in a call of its own, which may be the same


def message(places: Mapping[int, WaitReport], left: Sequence[int], here: str = "") -> str:
    """Who is where, of those that wait for ever, and who has left."""
    held: dict[tuple[str, str], list[int]] = {}
    for rank, place in places.items():
        held.setdefault((place.what, place.at), []).append(rank)
    where = [here] if here else []
    where += [
        f"{_ranks(ranks)} in {what}" + (f" ({at})" if at else "")
        for (what, at), ranks in itertools.islice(held.items(), 8)
    ]
    if len(held) > 8:
        where.append(f"{len(held) - 8} more places")
    if left:
        where.append(f"{_ranks(left)} gone: ended, or its engine destroyed")
    must = "must come to the same collectives in the same order"
    do = f"They would wait for ever. {EVERYWHERE}"
    return str(Problem("ranks", must, got=", ".join(where), do=do))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


# --- where a thread is ------------------------------------------------------------------------------------

_CALLS = frozenset(distributed_c10d.__all__)


def _call() -> _Call | None:
    """What the main thread waits in, that is not of this mesh; None where it is busy."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not frame.f_code.co_filename.startswith((_DISTRIBUTED, _COMM)):
        return None  # the innermost: what it calls is no Python
    outermost: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_COMM) or (name == distributed_c10d.__file__ and frame.f_code.co_name in _CALLS):
            outermost = frame  # the outermost, which is what was called
        elif outermost is not None and not name.startswith(_DISTRIBUTED):
            break
        frame = frame.f_back
    if outermost is None:
        return None
    key, at, called = (id(outermost), outermost.f_lasti), _user_line(outermost), outermost.f_code.co_name
    if outermost.f_code.co_filename.startswith(_COMM):
        return _Call(key, "a collective of another engine", at, (), False)
    sure = called in ("barrier", "monitored_barrier")
    return _Call(key, f"`torch.distributed.{called}`", at, _members(outermost.f_locals.get("group")), sure)


def _members(group: Any) -> tuple[int, ...]:
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        return tuple(dist.get_process_group_ranks(group))
    return ()


def is_the_users(file: str) -> bool:
    """Whether code of a file is neither torch's nor ours."""
    return not file.startswith((_TORCH, _OURS, "<frozen"))


def _user_line(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor ours."""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_the_users(name):
            return f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


# --- the store, and the end -------------------------------------------------------------------------------


def cut(groups: Iterable[Any], device: str) -> None:
    """End all waits on the groups. See [Note: cutting]."""
    for group in groups:
        with contextlib.suppress(RuntimeError, ValueError):  # cut already, or destroyed
            if device == "cuda":
                group.abort()
                continue
            other = (dist.get_rank(group) + 1) % dist.get_world_size(group)
            work = dist.irecv(torch.empty(1), group=group, group_src=other, tag=_NOBODY_SENDS)
            if work is not None:
                work.wait(timedelta(milliseconds=1))


def _read(store: Any, key: str) -> bytes:
    """What is there; empty where nothing is, or the store is gone."""
    try:
        return bytes(store.get(key)) if store.check([key]) else b""
    except RuntimeError:
        return b""
