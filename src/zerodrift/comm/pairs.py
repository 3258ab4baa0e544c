"""Collectives as messages between pairs of ranks: how they are carried on gloo.

`collectives.py` says what moves, and checks and records it; here are the messages, their order, and the
memory that they arrive in. What arrives is added by `fold`, or on the way by `halving`. Between ranks that
share memory (`shared.py`) large messages stay where they were written, and gloo brings their place.

Invariant: which messages a rank sends and receives follows from the sizes and the axis alone, so ranks in the
same collective always wait for each other's, and in no other.

[Note: messages] gloo's own reduce-scatter costs about five times an exchange of slices between pairs, and its
all-gather three times, so both are exchanges here. A message is matched by sender, tag and order; the tag
numbers the collectives of a group, so those under way at once cannot take each other's, and has a digest of
what moves and in which sizes, so ranks in different collectives miss each other, which `watch.py` sees; gloo
ends the process when a message does not fit where it is received. A reduction that is waited for at once
receives a window of chunks rather than everything: the window stays in cache between arrival and sum, and the
wire needs at most WINDOW bytes however large the segment is. One that is only started posts every receive,
because a receive that is posted in `wait` would hang two ranks that wait for two operations in different
orders. Either way the memory is kept for the next reduction, since fresh pages cost as much as the message
that fills them; `release` lets go of it.

[Note: by halves] A reduction by halves sends its first half when it is started; what it sends next has to
arrive first, so that is done in `wait`, and ranks that waited for two such reductions in different orders
would hang. All ranks wait in one order: for the oldest reduction first, at places that follow from the plan's
order alone (`engine/step/gradients.py`), and for an all-reduce where it is called; a gather needs nobody's
`wait`. So of those that wait, the one in the oldest reduction, and in its earliest swap, waits for a message
that was sent, or for a rank that computes and will come there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zerodrift.comm.fold import Sum, fold
from zerodrift.comm.halving import Swap, room_for, swaps
from zerodrift.comm.mesh import Axis
from zerodrift.comm.shared import SharedMemory
from zerodrift.comm.watch import StartedCollective
from zerodrift.errors import RankError, first_line

CHUNK = 2 << 20
"""Bytes of one message of a reduction; below it the messages cost more than they save."""
WINDOW = 16 << 20
"""Bytes that a reduction receives ahead of its sums, at most."""
DEPTH = 4
"""Chunks per peer in the window."""
LEAST = 64 << 10
"""Bytes from which on a message goes through shared memory, where there is some."""
NOT_SHARED = -1
"""Instead of a place: the values come by gloo after all, because the host has no memory left."""
IN_PLACE = -1
"""The batch of what is read in place."""
_FIRST_TAG = 1 << 30
_TAGS = 1 << 14
"""Collectives that a tag can number; above the number is a digest of as many values. gloo has 31 bits."""


class Pairs:
    """Carries collectives. What it returns is to be called once, to wait for the other ranks."""

    def __init__(self, shared: SharedMemory | None) -> None:
        """Through shared memory, unless that is None."""
        self._scratch = Scratch()
        self._shared = shared

    def _post(self, turn: StartedCollective, line: Axis, message: int, total: int) -> Post:
        return Post(turn, line, message, total, self._shared)

    def gather(
        self, turn: StartedCollective, line: Axis, out: torch.Tensor, shard: torch.Tensor
    ) -> Callable[[], None]:
        """Every other rank's slice into its place in `out`."""
        post = self._post(turn, line, shard.nbytes, shard.nbytes)
        for _, source in post.turns:
            post.receive(line.slice(out, source), source)
        post.send(shard, [to for to, _ in post.turns])
        return post.finish

    def swap(
        self,
        turn: StartedCollective,
        line: Axis,
        coming: Sequence[torch.Tensor],
        going: Sequence[torch.Tensor],
    ) -> Callable[[], None]:
        """`going[rank]` to every rank, what it sends us into `coming[rank]`. Both know the sizes."""
        width = going[0].shape[1] * going[0].itemsize
        post = self._post(turn, line, width, 0)
        for to, source in post.turns:
            if coming[source].shape[0]:
                post.receive(coming[source], source)
            if going[to].shape[0]:
                post.send(going[to], [to])
        coming[line.rank].copy_(going[line.rank])
        return post.finish

    def sum(
        self,
        turn: StartedCollective,
        line: Axis,
        out: torch.Tensor,
        outgoing: Sequence[torch.Tensor],
        how: Sum,
        *,
        ahead: bool,
    ) -> Callable[[], None]:
        """Send `outgoing[rank]` to every other rank; sum what they send, and our own, into `out`.

        Chunk by chunk, a window of them received before their sums, or all with `ahead`: see
        [Note: messages].
        """
        own = outgoing[line.rank]
        chunk = _chunk(own, line)
        post = self._post(turn, line, chunk * own.itemsize, own.nbytes)
        near = [rank for rank, _ in post.turns if post.shares(rank, own.nbytes)]
        far_to = [to for to, _ in post.turns if to not in near]
        far_from = [source for _, source in post.turns if source not in near]
        count = -(-own.numel() // chunk)
        depth = count if ahead else min(DEPTH, count)
        arrivals, held = self._scratch.take(depth * len(far_from) * chunk, own.dtype)
        rooms = arrivals.view(depth, len(far_from), chunk)

        def bounds(number: int) -> slice:
            return slice(number * chunk, min((number + 1) * chunk, own.numel()))

        def receive(number: int) -> None:
            span = bounds(number)
            for room, source in zip(rooms[number % depth], far_from, strict=True):
                post.receive(room[: span.stop - span.start], source, number)

        def finish() -> None:
            spare, held_spare = self._scratch.take(chunk, how.dtype)
            read = dict(post.collect(IN_PLACE))
            for number in range(count):
                # Our own chunk has left, too, before its sum may overwrite it.
                parts = dict(post.collect(number))
                parts |= {rank: values[bounds(number)] for rank, values in read.items()}
                parts[line.rank] = own[bounds(number)]
                fold(out[bounds(number)], [parts[rank] for rank in range(line.size)], how, spare)
                if number + depth < count:
                    receive(number + depth)
            post.give_back()
            # Not reached when a rank is missing: late messages may still be written to these buffers.
            self._scratch.give(held, held_spare)

        for source in near:
            post.borrow(own, source)
        for number in range(depth):
            receive(number)
        if all(values is own for values in outgoing):
            post.send(own, near, IN_PLACE)
        else:
            for to in near:
                post.send(outgoing[to], [to], IN_PLACE)
        for number in range(count):
            for to in far_to:
                post.send(outgoing[to][bounds(number)], [to], number)
        return finish

    def halve(
        self, turn: StartedCollective, line: Axis, out: torch.Tensor, full: torch.Tensor, how: Sum
    ) -> Callable[[], None]:
        """The same sum by halves: see [Note: by halves]."""
        post = self._post(turn, line, full.nbytes // 2, full.nbytes)
        room, held = self._scratch.take(room_for(full), full.dtype)

        def begin(swap: Swap) -> Swap:
            post.receive(swap.coming, swap.partner)
            post.send(swap.going, [swap.partner])
            return swap

        others = swaps(full, line.rank, line.size, room)
        first = begin(next(others))

        def finish() -> None:
            post.finish()
            last = first
            for swap in others:
                last = begin(swap)
                post.finish()
            fold(out, (last.coming, last.kept), how, spare=last.coming)
            self._scratch.give(held)

        return finish

    def release(self) -> None:
        """Let go of the memory that is kept between reductions."""
        self._scratch.drop()
        if self._shared is not None:
            self._shared.own.release()


@dataclass(frozen=True, slots=True)
class _Message:
    """One under way."""

    work: dist.Work
    peer: int
    into: torch.Tensor | None
    """Where it goes, or what it is like if it is read in place; None for what was sent."""
    start: torch.Tensor | None
    """Of one in shared memory: where it lies, which is what gloo brings."""
    in_place: bool


class Post:
    """The messages of one collective between this rank and the others of its axis."""

    def __init__(
        self, turn: StartedCollective, line: Axis, message: int, total: int, shared: SharedMemory | None
    ) -> None:
        """`message` bytes at a time, `total` to each rank."""
        self._op, self.line = turn.op, line
        digest = zlib.crc32(f"{turn.what} {message} {total}".encode()) % _TAGS
        self._tag = _FIRST_TAG + digest * _TAGS + turn.number % _TAGS
        size, rank = line.size, line.rank
        self.turns = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
        """(to, from): in each turn every rank sends one message and receives one."""
        self._posted: dict[int, list[_Message]] = {}
        """Batch -> what was posted in it."""
        self._shared = shared
        self._borrowed: list[tuple[int, int]] = []
        """(rank, place) of what is read in place."""

    def shares(self, rank: int, size: int) -> bool:
        """Whether messages of that size, to and from that rank, go through shared memory."""
        return size >= LEAST and self._shared is not None and self.line.ranks[rank] in self._shared.peers

    def send(self, tensor: torch.Tensor, to: Sequence[int], batch: int = 0) -> None:
        """The same to each of several."""
        near = [rank for rank in to if self.shares(rank, tensor.nbytes)]
        start = self._write(tensor, near) if near else NOT_SHARED
        for rank in to:
            if rank in near:
                self._send(torch.tensor(start), rank, batch)
            if rank not in near or start == NOT_SHARED:
                self._send(tensor, rank, batch)

    def _write(self, tensor: torch.Tensor, readers: Sequence[int]) -> int:
        assert self._shared is not None
        try:
            return self._shared.own.write(tensor.view(-1), readers, self.line.size)
        except OSError:
            return NOT_SHARED

    def _send(self, tensor: torch.Tensor, to: int, batch: int) -> None:
        try:
            work = dist.isend(tensor, group=self.line.group, tag=self._tag, group_dst=to)
        except RuntimeError as error:
            raise missing(self._op, self.line, error, to) from error
        self._posted.setdefault(batch, []).append(_Message(self._member(work), to, None, None, False))

    def receive(self, tensor: torch.Tensor, source: int, batch: int = 0) -> None:
        start = torch.tensor(NOT_SHARED) if self.shares(source, tensor.nbytes) else None
        self._receive(tensor, source, batch, start, in_place=False)

    def borrow(self, like: torch.Tensor, source: int) -> None:
        """A message of that size and dtype is read in shared memory, until `give_back`."""
        self._receive(like, source, IN_PLACE, torch.tensor(NOT_SHARED), in_place=True)

    def _receive(
        self, into: torch.Tensor, source: int, batch: int, start: torch.Tensor | None, *, in_place: bool
    ) -> None:
        work = self._irecv(into if start is None else start, source)
        self._posted.setdefault(batch, []).append(_Message(work, source, into, start, in_place))

    def _irecv(self, tensor: torch.Tensor, source: int) -> dist.Work:
        try:
            work = dist.irecv(tensor, group=self.line.group, tag=self._tag, group_src=source)
        except RuntimeError as error:
            raise missing(self._op, self.line, error, source) from error
        return self._member(work)

    def _member(self, work: dist.Work | None) -> dist.Work:
        if work is None:
            raise AssertionError(f"rank {self.line.rank} is not in the group of axis {self.line.name!r}")
        return work

    def collect(self, batch: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Wait for a batch; (source, tensor) of what arrived."""
        for message in self._posted.pop(batch, []):
            self._wait(message.work, message.peer)
            if message.into is not None:
                start = NOT_SHARED if message.start is None else int(message.start)
                yield message.peer, self._arrived(message, message.into, start)

    def _wait(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise missing(self._op, self.line, error, peer) from error

    @torch.no_grad()
    def _arrived(self, message: _Message, into: torch.Tensor, start: int) -> torch.Tensor:
        if message.start is None:
            return into
        if start == NOT_SHARED or self._shared is None:
            into = torch.empty_like(into) if message.in_place else into
            self._wait(self._irecv(into, message.peer), message.peer)
            return into
        memory = self._shared.peers[self.line.ranks[message.peer]]
        try:
            values = memory.read(start, into.nbytes, self.line.size).view(into.dtype)
        except OSError as error:
            raise missing(self._op, self.line, RuntimeError(str(error)), message.peer) from error
        if message.in_place:
            self._borrowed.append((message.peer, start))
            return values
        into.copy_(values.view(into.shape))
        memory.done(start, self.line.rank)
        return into

    def give_back(self) -> None:
        """What was borrowed is not read any more."""
        for peer, start in self._borrowed:
            assert self._shared is not None
            self._shared.peers[self.line.ranks[peer]].done(start, self.line.rank)
        self._borrowed.clear()

    def finish(self) -> None:
        for batch in list(self._posted):
            for _ in self.collect(batch):
                pass


class Scratch:
    """Host memory that is kept between reductions."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A flat tensor of that many elements, and what to give back."""
        size = numel * dtype.itemsize
        fits = [number for number, buffer in enumerate(self._free) if buffer.numel() >= size]
        if fits:
            held = self._free.pop(min(fits, key=lambda number: self._free[number].numel()))
        else:
            # One that is too small goes, so there are never more than were in use at once.
            del self._free[:1]
            held = torch.empty(size, dtype=torch.uint8)
        return held[:size].view(dtype), held

    def give(self, *held: torch.Tensor) -> None:
        self._free.extend(held)

    def drop(self) -> None:
        self._free.clear()


def _chunk(own: torch.Tensor, line: Axis) -> int:
    """Elements of one message. The same on every rank, whatever has been sent before."""
    share = WINDOW // (DEPTH * (line.size - 1))
    return min(own.numel(), max(1, min(CHUNK, share) // own.itemsize))


def missing(op: str, line: Axis, error: RuntimeError, peer: int | None = None) -> RankError:
    """The error for ranks of an axis, or one of them, that did not take part."""
    others = [rank for rank in line.ranks if rank != line.ranks[line.rank]]
    if peer is not None:
        others = [line.ranks[peer]]
    who = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others[:8]))}"
    more = ", ..." if len(others) > 8 else ""
    return RankError(
        f"`{op}` on axis `{line.name}`",
        f"{who}{more} must take part within the timeout",
        got=repr(first_line(error)),
        do=(
            "That rank died, hangs, or is in another collective: look at the output of the rank that "
            "failed first. If it was only slow, start the mesh with a longer `timeout`."
        ),
    )
