"""The deadlock watch: where each rank is among the collectives, and an error for ranks that wait for ever.

Every collective of a group has a number and a few words, `all_gather of layers.1`, kept by a `CollectiveLog`.
A rank that has waited for some seconds writes its place to the store of its group, and reads the places of
the others that wait. If they wait in a circle, for a rank that has left, or at the same number for another
operation, none can ever go on: then the error is written to the store, connections are cut, and every rank
that waits raises it.

Invariant: nothing is sent, read or raised while no rank waits for long; and a rank that computes, loads
data, compiles, or sits in a debugger is waited for, however long that takes.

[Note: what is certain] A rank writes again and again while it stays at a place, with a number that grows. The
one that judges wants to see all of a circle twice more at the places where it saw them first, so there was a
moment at which all of them waited there. A rank that writes nothing is busy, and those who wait for it can go
on once it is done.

[Note: other people's collectives] A rank may also wait in `torch.distributed.barrier()` while another
evaluates alone. The thread looks where the main thread is (`call_stack.py`). Nobody leaves a barrier before
all have come, so a rank in one waits for all that are not. In other calls, and in those of another engine,
values may still be on their way: they count after LONG, and both only if no rank at all is busy.

[Note: NCCL] There a wait does not hold up the host, so ranks are compared where the host waits for the
device, which is once per step, at the norm: a rank that runs ahead has started what the others have not. NCCL
does not tell two calls of equal size at the same number apart; the checksum that travels with the norm does.

[Note: cutting] `abort` of a group is what ends waits on NCCL; gloo has it, but it does nothing there (torch
2.13). gloo closes all connections of a group when a wait on one of them has timed out, so `cut` waits
for a message that nobody sends, for a millisecond.
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
from typing import Any

import torch
import torch.distributed as dist

from zerodrift.comm.call_stack import ForeignCall, foreign_call, user_line
from zerodrift.errors import Problem, RankError

INTERVAL = 0.5
"""Seconds between two looks of the thread."""
PATIENCE = 3.0
"""Seconds of a wait before the store is asked."""
LONG = 30.0
"""Seconds of a wait in which values may still be on their way."""
KEPT = 64
"""Collectives of a group whose words are kept."""

EVERYWHERE = (
    "Use the engine (a forward, a backward, `step`, an evaluation, `gathered`, `parameter`, a save) on every "
    "rank, or on none."
)

_COUNT = "zerodrift/watches"
_UNUSED_TAG = (1 << 30) - 1
"""A tag below those of `pairs`."""


class CollectiveLog:
    """The collectives of one group, as this rank has started them."""

    def __init__(self, ranks: range) -> None:
        self.ranks = ranks
        self.count = 0
        self.checksum = 0
        """A checksum of the words of all collectives, in their order; below 2^32."""
        self._kept = [""] * KEPT

    def add(self, what: str) -> int:
        """Log the next collective, in words that are the same on all ranks; return its number."""
        number = self.count
        self._kept[number % KEPT] = what
        self.checksum = zlib.crc32(what.encode(), self.checksum)
        self.count += 1
        return number

    def last(self) -> list[str]:
        """Return the words of the last collectives, oldest first."""
        kept = range(max(0, self.count - KEPT), self.count)
        return [self._kept[number % KEPT] for number in kept]


@dataclass(frozen=True, slots=True)
class WaitReport:
    """The place where a rank waits, as others read it."""

    beat: int
    """Grows with every writing."""
    serial: str
    """The name of the wait: another wait has another."""
    what: str
    at: str
    """The line of the user's code."""
    group: str
    """The group of the collective; "" for a call that is not of this mesh."""
    number: int
    needs: Sequence[int]
    """The ranks that must come to the same place."""
    trails: Mapping[str, tuple[int, Sequence[str]]] = field(default_factory=dict)
    """Per group of the mesh: how many collectives it has started, and the words of the last."""

    def started(self, group: str, number: int) -> str | None:
        """Return the words of a collective; "" if they are not kept, None if it has not been started."""
        count, words = self.trails.get(group, (0, ()))
        if number >= count:
            return None
        back = count - number
        return words[-back] if back <= len(words) else ""

    @classmethod
    def read(cls, text: bytes) -> WaitReport:
        return cls(**json.loads(text))

    def write(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


class CollectiveWait:
    """The context of one collective. A class and no generator, because a step has hundreds of them."""

    __slots__ = ("_before", "_watch", "number", "ranks", "serial", "since", "thread", "what")

    def __init__(self, watch: DeadlockWatch, what: str, number: int, ranks: range) -> None:
        self._watch, self.serial = watch, next(watch._serials)
        self.what, self.number, self.ranks = what, number, ranks

    def __enter__(self) -> None:
        watch = self._watch
        if watch.error:
            raise RankError.relayed(watch.error)
        self.since, self.thread = time.monotonic(), threading.get_ident()
        self._before, watch._waits = watch._waits, self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        watch = self._watch
        try:
            if error is not None:
                watch.explain(self, error)
        finally:
            watch._waits = self._before
        if error is None and watch.error:
            raise RankError.relayed(watch.error)


class DeadlockWatch:
    """The watch of one mesh on one rank. All ranks make one before any makes another."""

    def __init__(
        self, rank: int, trails: Iterable[CollectiveLog], groups: Sequence[Any], device: str
    ) -> None:
        """Watch a mesh. `groups` are those to cut; the first holds all ranks, and its store is used."""
        self.error = ""
        """The text of an error of the whole mesh; empty as long as there is none."""
        self.is_polling = False
        """True to read the store while no rank waits in a collective, as an `Alarm` needs."""
        self._rank = rank
        self._trails = {str(trail.ranks): trail for trail in trails}
        self._groups, self._device = tuple(groups), device
        self._waits: CollectiveWait | None = None
        self._serials = itertools.count()
        self._is_over, self._is_cut = threading.Event(), threading.Lock()
        self._process = os.getpid()
        self._store: Any = None  # torch's stubs do not know all that a store can do
        self._thread: threading.Thread | None = None
        self._world = 1
        self._foreign: tuple[ForeignCall, float] | None = None
        """The call of another library that the main thread is in, and when it was first seen there."""
        self._beats: dict[int, tuple[int, int]] = {}
        """Rank -> its last beat, and the rounds since then in which it has not grown."""
        self._first: dict[int, tuple[str, int]] = {}
        """Ranks of the last circle -> the name of the wait, and its beat when it was first seen there."""
        if groups:
            self._world = groups[0].size()
            self._store = groups[0].get_group_store()
            # A launcher may keep a store longer than a mesh lasts: each mesh has keys of its own.
            self._key = f"zerodrift/watch/{(self._store.add(_COUNT, 1) - 1) // self._world}"
            own_store = (self._store.clone(),)  # a connection serves one thread at a time
            self._thread = threading.Thread(
                target=self._run, args=own_store, name="zerodrift-watch", daemon=True
            )
            self._thread.start()

    def explain(self, wait: CollectiveWait, error: BaseException) -> None:
        """Raise the known cause of a collective's error; if there is none, tell the others of the error."""
        if not isinstance(error, (RuntimeError, RankError)):
            return
        cause = self.read_error()
        if not cause and self._store is not None:
            left = [rank for rank in wait.ranks if read_key(self._store, f"{self._key}/left/{rank}")]
            cause = deadlock_text({}, left, f"{ranks_text([self._rank])} in {wait.what}") if left else ""
        if cause and cause != str(error):
            raise RankError.relayed(cause) from error
        if isinstance(error, RankError) and not cause:
            # This rank leaves because of another, which those who wait for this one may not miss.
            self._write_error(str(error))

    def fail(self, text: str) -> None:
        """Make this error that of the whole mesh, unless it has one, and end all waits of this rank."""
        self.error = self.error or text
        self._write_error(text)
        self._cut()

    def stop(self) -> None:
        """Leave: ranks that wait for this one read it in the store."""
        if self._process != os.getpid() or self._is_over.is_set():
            return
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(timeout=5 * INTERVAL)
        if self._store is not None and not self.error:
            with contextlib.suppress(RuntimeError):  # the rank that had it may have left before
                self._store.set(f"{self._key}/left/{self._rank}", "left")
        # gloo's threads are waited for when the last reference to a group goes.
        self._groups, self._store, self._thread = (), None, None

    def read_error(self) -> str:
        """Return the error of the whole mesh, from the store if need be; "" if there is none."""
        if not self.error and self._store is not None:
            self.error = self._stored_error(self._store)
        return self.error

    def _stored_error(self, store: Any) -> str:
        return read_key(store, f"{self._key}/said").decode()

    def _write_error(self, text: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the rank that has it may be gone
                self._store.compare_set(f"{self._key}/said", "", text)

    def _cut(self) -> None:
        if self._is_cut.acquire(blocking=False):  # once, by one thread
            cut(self._groups, self._device)

    # --- the thread -------------------------------------------------------------------------------------

    def _run(self, store: Any) -> None:
        for beat in itertools.count():
            if self._is_over.wait(INTERVAL):
                return
            error, place = "", self._place()
            try:
                if place is not None:
                    trails = {group: (trail.count, trail.last()) for group, trail in self._trails.items()}
                    error = self._judge(store, WaitReport(beat, *place, trails))
                elif self.is_polling:
                    error = self._stored_error(store)
            except RuntimeError:
                return  # the store has gone with the rank that had it, and with it that rank's connections
            if error:
                self.error = error
                self._cut()
                return

    def _place(self) -> tuple[str, str, str, str, int, list[int]] | None:
        """Return the place where this rank has waited for long; None if there is none."""
        now, wait, seen = time.monotonic(), self._waits, self._foreign
        if wait is not None:
            self._foreign = None
            if now - wait.since < PATIENCE:
                return None
            at, ranks = user_line(sys._current_frames().get(wait.thread)), list(wait.ranks)
            place = (f"turn {wait.serial}", wait.what, at, str(wait.ranks), wait.number)
        else:
            call = foreign_call()
            if call is None or seen is None or call.key != seen[0].key:
                self._foreign = None if call is None else (call, now)
                return None
            if now - seen[1] < (PATIENCE if call.is_barrier else LONG):
                return None
            place = (f"call {call.key}", call.name, call.at, "", 0)
            ranks = list(call.ranks or range(self._world))
        return (*place, [rank for rank in ranks if rank != self._rank])

    def _judge(self, store: Any, report: WaitReport) -> str:
        """Write where this rank waits; return the error that any rank has found, or ""."""
        store.set(f"{self._key}/{self._rank}", report.write())
        error = self._stored_error(store)
        if error:
            return error
        if any(self._fresh(store, rank) is not None for rank in range(self._rank)):
            self._first = {}
            return ""  # the first of the ranks that wait judges
        others = {rank: self._fresh(store, rank) for rank in range(self._rank + 1, self._world)}
        places = {self._rank: report, **{rank: place for rank, place in others.items() if place is not None}}
        silent = [rank for rank in range(self._world) if rank not in places]
        left = [rank for rank in silent if read_key(store, f"{self._key}/left/{rank}")]
        now = {rank: (places[rank].serial, places[rank].beat) for rank in stuck(places, left, self._world)}
        if {rank: now[rank][0] for rank in now} != {rank: self._first[rank][0] for rank in self._first}:
            self._first = now
        # See [Note: what is certain].
        if not now or any(beat < self._first[rank][1] + 2 for rank, (_, beat) in now.items()):
            return ""
        text = deadlock_text({rank: places[rank] for rank in now}, left)
        return str(store.compare_set(f"{self._key}/said", "", text).decode())

    def _fresh(self, store: Any, rank: int) -> WaitReport | None:
        """Return where another rank waits, if it has written that lately."""
        text = read_key(store, f"{self._key}/{rank}")
        if not text:
            return None
        report = WaitReport.read(text)
        beat, rounds = self._beats.get(rank, (report.beat, 0))
        rounds = rounds + 1 if beat == report.beat else 0
        self._beats[rank] = (report.beat, rounds)
        return report if rounds < 4 else None


def stuck(places: Mapping[int, WaitReport], left: Sequence[int], world: int) -> list[int]:
    """Return the ranks that can never go on. Ranks without a place that have not left are busy, and will."""
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
    """Return whether another rank has come, or may come, where this one waits."""
    here, there = places[rank], places.get(other)
    if other in go_on:
        return True
    if there is None:
        return False  # it has left
    if here.group:
        words = there.started(here.group, here.number)
        return words is not None and words in ("", here.what)
    return not there.group  # in a foreign call, which may be the same


def deadlock_text(places: Mapping[int, WaitReport], left: Sequence[int], here: str = "") -> str:
    """Return the error that says where ranks wait for ever, and which have left."""
    ranks_at: dict[tuple[str, str], list[int]] = {}
    for rank, place in places.items():
        ranks_at.setdefault((place.what, place.at), []).append(rank)
    where = [here] if here else []
    where += [
        f"{ranks_text(ranks)} in {what}" + (f" ({at})" if at else "")
        for (what, at), ranks in itertools.islice(ranks_at.items(), 8)
    ]
    if len(ranks_at) > 8:
        where.append(f"{len(ranks_at) - 8} more places")
    if left:
        where.append(f"{ranks_text(left)} gone: ended, or its engine destroyed")
    must = "must come to the same collectives in the same order"
    do = f"They would wait for ever. {EVERYWHERE}"
    return str(Problem("ranks", must, got=", ".join(where), do=do))


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks in a message: `ranks 1, 2`."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


# --- the store, and the connections -----------------------------------------------------------------------


def read_key(store: Any, key: str) -> bytes:
    """Return the value of a key; empty if there is none, or the store is gone."""
    try:
        return bytes(store.get(key)) if store.check([key]) else b""
    except RuntimeError:  # closed with its group, or with the rank that has it
        return b""


def cut(groups: Iterable[Any], device: str) -> None:
    """End all waits on the groups. See [Note: cutting]."""
    for group in groups:
        with contextlib.suppress(RuntimeError, ValueError):  # cut already, or destroyed
            if device != "cpu":
                group.abort()
                continue
            other = (dist.get_rank(group) + 1) % dist.get_world_size(group)
            work = dist.irecv(torch.empty(1), group=group, group_src=other, tag=_UNUSED_TAG)
            if work is not None:
                work.wait(timedelta(milliseconds=1))
