"""Collectives as messages between pairs of ranks: how they are carried on gloo.

`collectives.py` says what moves, and checks and records it; here are the messages, their order, and the
memory that they arrive in. What arrives is added by `fold`, or on the way by `halving`.

Invariant: which messages a rank sends and receives follows from the sizes and the axis alone, so ranks in
the same collective always wait for each other's, and in no other.

[Note: messages] gloo's own reduce-scatter costs about five times an exchange of slices between pairs, and
its all-gather three times, so both are exchanges here. A message is matched by sender, tag and order; the
tag numbers the collectives of a group, so those under way at once cannot take each other's, and has a
digest of what moves and in which sizes, so ranks in different collectives miss each other, which `watch.py`
sees; gloo ends the process when a message does not fit where it is received. A reduction
that is waited for at once receives a window of chunks rather than everything: the window stays in cache
between arrival and sum, and the wire needs at most WINDOW bytes however large the segment is. One that is
only started posts every receive, because a receive that is posted in `wait` would hang two ranks that wait
for two operations in different orders. Either way the memory is kept for the next reduction, since fresh
pages cost as much as the message that fills them; `release` lets go of it.

[Note: by halves] A reduction by halves sends its first half when it is started; what it sends next has to
arrive first, so that is done in `wait`, and ranks that waited for two such reductions in different orders
would hang. All ranks wait in one order: for the oldest reduction first, at places that follow from the plan's
order alone (`engine/grads.py`), and for an all-reduce where it is called; a gather needs nobody's `wait`. So
of those that wait, the one in the oldest reduction, and in its earliest swap, waits for a message that was
sent, or for a rank that computes and will come there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from zerodrift.comm.fold import Sum, fold
from zerodrift.comm.halving import Swap, room_for, swaps
from zerodrift.comm.mesh import Axis
from zerodrift.comm.watch import StartedCollective
from zerodrift.errors import RankError, first_line

CHUNK = 2 << 20
"""Bytes of one message of a reduction; below it the messages cost more than they save."""
WINDOW = 16 << 20
"""Bytes that a reduction receives ahead of its sums, at most."""
DEPTH = 4
"""Chunks per peer in the window."""
_FIRST_TAG = 1 << 30
_TAGS = 1 << 14
"""Collectives that a tag can number; above the number is a digest of as many values. gloo has 31 bits."""


class Pairs:
    """Carries collectives. What it returns is to be called once, to wait for the other ranks."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def gather(
        self, turn: StartedCollective, line: Axis, out: torch.Tensor, shard: torch.Tensor
    ) -> Callable[[], None]:
        """Every other rank's slice into its place in `out`."""
        post = Post(turn, line, shard.nbytes, shard.nbytes)
        for to, source in post.turns:
            post.receive(line.slice(out, source), source)
            post.send(shard, to)
        return post.finish

    def swap(
        self,
        turn: StartedCollective,
        line: Axis,
        coming: Sequence[torch.Tensor],
        going: Sequence[torch.Tensor],
    ) -> None:
        """`going[rank]` to every rank, what it sends us into `coming[rank]`. Both know the sizes."""
        width = going[0].shape[1] * going[0].itemsize
        post = Post(turn, line, width, 0)
        for to, source in post.turns:
            if coming[source].shape[0]:
                post.receive(coming[source], source)
            if going[to].shape[0]:
                post.send(going[to], to)
        coming[line.rank].copy_(going[line.rank])
        post.finish()

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
        post = Post(turn, line, chunk * own.itemsize, own.nbytes)
        count = -(-own.numel() // chunk)
        depth = count if ahead else min(DEPTH, count)
        arrivals, held = self._scratch.take(depth * (line.size - 1) * chunk, own.dtype)
        rooms = arrivals.view(depth, line.size - 1, chunk)

        def bounds(number: int) -> slice:
            return slice(number * chunk, min((number + 1) * chunk, own.numel()))

        def receive(number: int) -> None:
            span = bounds(number)
            for room, (_, source) in zip(rooms[number % depth], post.turns, strict=True):
                post.receive(room[: span.stop - span.start], source, number)

        def finish() -> None:
            spare, held_spare = self._scratch.take(chunk, how.dtype)
            for number in range(count):
                # Our own chunk has left, too, before its sum may overwrite it.
                parts = dict(post.collect(number))
                parts[line.rank] = own[bounds(number)]
                fold(out[bounds(number)], [parts[rank] for rank in range(line.size)], how, spare)
                if number + depth < count:
                    receive(number + depth)
            # Not reached when a rank is missing: late messages may still be written to these buffers.
            self._scratch.give(held, held_spare)

        for number in range(depth):
            receive(number)
        for number in range(count):
            for to, _ in post.turns:
                post.send(outgoing[to][bounds(number)], to, number)
        return finish

    def halve(
        self, turn: StartedCollective, line: Axis, out: torch.Tensor, full: torch.Tensor, how: Sum
    ) -> Callable[[], None]:
        """The same sum by halves: see [Note: by halves]."""
        post = Post(turn, line, full.nbytes // 2, full.nbytes)
        room, held = self._scratch.take(room_for(full), full.dtype)

        def begin(swap: Swap) -> Swap:
            post.receive(swap.coming, swap.partner)
            post.send(swap.going, swap.partner)
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


class Post:
    """The messages of one collective between this rank and the others of its axis."""

    def __init__(self, turn: StartedCollective, line: Axis, message: int, total: int) -> None:
        """`message` bytes at a time, `total` to each rank."""
        self._op, self.line = turn.op, line
        digest = zlib.crc32(f"{turn.what} {message} {total}".encode()) % _TAGS
        self._tag = _FIRST_TAG + digest * _TAGS + turn.number % _TAGS
        size, rank = line.size, line.rank
        self.turns = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
        """(to, from): in each turn every rank sends one message and receives one."""
        self._posted: dict[int, list[tuple[dist.Work, int, torch.Tensor | None]]] = {}
        """Batch -> what was posted in it; the tensor is None for what was sent."""

    def send(self, tensor: torch.Tensor, to: int, batch: int = 0) -> None:
        try:
            work = dist.isend(tensor, group=self.line.group, tag=self._tag, group_dst=to)
        except RuntimeError as error:
            raise missing(self._op, self.line, error, to) from error
        self._add(work, to, None, batch)

    def receive(self, tensor: torch.Tensor, source: int, batch: int = 0) -> None:
        try:
            work = dist.irecv(tensor, group=self.line.group, tag=self._tag, group_src=source)
        except RuntimeError as error:
            raise missing(self._op, self.line, error, source) from error
        self._add(work, source, tensor, batch)

    def _add(self, work: dist.Work | None, peer: int, tensor: torch.Tensor | None, batch: int) -> None:
        if work is None:
            raise AssertionError(f"rank {self.line.rank} is not in the group of axis {self.line.name!r}")
        self._posted.setdefault(batch, []).append((work, peer, tensor))

    def collect(self, batch: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Wait for a batch; (source, tensor) of what arrived."""
        for work, peer, tensor in self._posted.pop(batch, []):
            try:
                work.wait()
            except RuntimeError as error:
                raise missing(self._op, self.line, error, peer) from error
            if tensor is not None:
                yield peer, tensor

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
