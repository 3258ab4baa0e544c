"""Collectives as messages between pairs of ranks: the carrier of gloo.

`collectives.py` decides which values move, and checks and records it. This file has the messages, their order
and their buffers; `fold` adds the values that arrive. Between ranks that share memory (`shared.py`), large
messages stay where they were written, and gloo carries their place.

Invariant: the messages of a rank follow from the sizes and the axis alone, so ranks in the same collective
wait for each other's messages, and ranks in different collectives do not.

[Note: messages] gloo's own reduce-scatter costs about five times an exchange of slices between pairs, and
its all-gather three times, so both are exchanges here. A message is matched by sender, tag and order. The tag
numbers the collectives of a group, so collectives that overlap cannot take each other's messages. It also
contains a digest of the operation and its sizes: ranks in different collectives then wait for ever, which
`watch.py` sees, where gloo would end the process over a message that does not fit.

A reduction that is waited for at once receives a window of chunks: the window stays in cache between arrival
and sum, and needs at most WINDOW bytes however large the segment is. A reduction that is only started posts
every receive, because two ranks that wait for two operations in different orders would hang if `wait` posted
them. The buffers are kept for the next reduction, since fresh pages cost as much as the message.

[Note: by halves] A reduction by halves sends its first half at the start and the rest in `wait`, since it has
to receive first. Ranks that waited for two such reductions in different orders would hang. All ranks wait in
one order: for the oldest reduction first, at places that follow from the plan's order alone
(`engine/step/reduce.py`), and for an all-reduce where it is called; a gather needs nobody's `wait`. So of
the ranks that wait, the one in the oldest reduction, at its earliest exchange, waits for a message that was
sent, or for a rank that computes and will send it.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerodrift.comm.fold import HalvingExchange, Sum, fold, halving_exchanges
from zerodrift.comm.mesh import Axis, Mesh, StartedCollective
from zerodrift.comm.shared import OwnMemory, SharedMemory
from zerodrift.kernels import HostBuffers

CHUNK = 2 << 20
"""Bytes of one message of a reduction. Smaller messages cost more than they save."""
WINDOW = 16 << 20
"""The most bytes that a reduction receives ahead of its sums."""
DEPTH = 4
"""Chunks per peer in the window."""
LEAST = 64 << 10
"""The fewest bytes of a message that goes through shared memory."""
NOT_SHARED = -1
"""The place of values that travel by gloo because the host has no shared memory left."""
IN_PLACE = -1
"""The batch of messages that are read in place."""
_FIRST_TAG = 1 << 30
_TAGS = 1 << 14
"""Values of the number in a tag, and of the digest above it: gloo has 31 bits."""


class Pairs:
    """Carries collectives by messages. Calls return a function that waits for the other ranks, once."""

    def __init__(self, mesh: Mesh, shared: SharedMemory | None) -> None:
        self.mesh = mesh
        self._scratch = HostBuffers()
        self.shared = shared or SharedMemory(OwnMemory(), {})

    @torch.no_grad()
    def gather(self, turn: StartedCollective, out: Tensor, shard: Tensor) -> Callable[[], None]:
        """Receive every other rank's slice into its place in `out`."""
        post = Post(self, turn, shard.nbytes, shard.nbytes)
        for _, source in post.turns:
            post.receive(turn.line.slice(out, source), source)
        post.send(shard, [to for to, _ in post.turns])
        own = turn.line.slice(out, turn.line.rank)
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)  # while the messages travel
        return post.finish

    def swap(
        self, turn: StartedCollective, out: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Callable[[], None]:
        """Exchange rows between all ranks, which know the sizes. Shape [rows, width]."""
        outgoing, incoming = rows.split(list(send)), out.split(list(receive))
        post = Post(self, turn, rows.shape[1] * rows.itemsize, 0)
        for to, source in post.turns:
            if receive[source]:
                post.receive(incoming[source], source)
            if send[to]:
                post.send(outgoing[to], [to])
        incoming[turn.line.rank].copy_(outgoing[turn.line.rank])
        return post.finish

    def sum(
        self, turn: StartedCollective, out: Tensor, full: Tensor, how: Sum, *, ahead: bool
    ) -> Callable[[], None]:
        """Sum this rank's slices of every rank's `full` into `out`, or all of it if `out` is as long.

        A window of chunks is received before their sums, or all with `ahead`. See [Note: messages].
        """
        is_whole = out.numel() == full.numel()
        outgoing = [full if is_whole else turn.line.slice(full, rank) for rank in range(turn.line.size)]
        line = turn.line
        own = outgoing[line.rank]
        # The elements of one message: the same on every rank, whatever has been sent before.
        share = WINDOW // (DEPTH * (line.size - 1))
        chunk = min(own.numel(), max(1, min(CHUNK, share) // own.itemsize))
        post = Post(self, turn, chunk * own.itemsize, own.nbytes)
        near = [rank for rank, _ in post.turns if _shares(self.shared, line, rank, own.nbytes)]
        far_to = [to for to, _ in post.turns if to not in near]
        far_from = [source for _, source in post.turns if source not in near]
        count = -(-own.numel() // chunk)
        depth = count if ahead else min(DEPTH, count)
        arrivals = self._scratch.take(depth * len(far_from) * chunk, own.dtype)
        rooms = arrivals.view(depth, len(far_from), chunk)

        def bounds(number: int) -> slice:
            return slice(number * chunk, min((number + 1) * chunk, own.numel()))

        def receive(number: int) -> None:
            span = bounds(number)
            for room, source in zip(rooms[number % depth], far_from, strict=True):
                post.receive(room[: span.stop - span.start], source, number)

        def finish() -> None:
            spare = self._scratch.take(chunk, how.dtype)
            read = dict(post.collect(IN_PLACE))
            for number in range(count):
                # This rank's own chunk has been sent too, before its sum may overwrite it.
                parts = dict(post.collect(number))
                parts |= {rank: values[bounds(number)] for rank, values in read.items()}
                parts[line.rank] = own[bounds(number)]
                fold(out[bounds(number)], [parts[rank] for rank in range(line.size)], how, spare)
                if number + depth < count:
                    receive(number + depth)
            post.give_back()
            # Not after an error: late messages may still be written to these buffers.
            self._scratch.give(arrivals)
            self._scratch.give(spare)

        for source in near:
            post.receive(own, source, IN_PLACE)
        for number in range(depth):
            receive(number)
        if is_whole:
            post.send(own, near, IN_PLACE)
        else:
            for to in near:
                post.send(outgoing[to], [to], IN_PLACE)
        for number in range(count):
            for to in far_to:
                post.send(outgoing[to][bounds(number)], [to], number)
        return finish

    @torch.no_grad()
    def halve(self, turn: StartedCollective, out: Tensor, full: Tensor, how: Sum) -> Callable[[], None]:
        """Sum by recursive halving. See [Note: by halves]."""
        post = Post(self, turn, full.nbytes // 2, full.nbytes)
        room = self._scratch.take(full.numel(), full.dtype)

        def begin(exchange: HalvingExchange) -> HalvingExchange:
            post.receive(exchange.incoming, exchange.partner)
            post.send(exchange.outgoing, [exchange.partner])
            return exchange

        exchanges = halving_exchanges(full, turn.line.rank, turn.line.size, room)
        first = begin(next(exchanges))

        @torch.no_grad()
        def finish() -> None:
            post.finish()
            last = first
            for exchange in exchanges:
                last = begin(exchange)
                post.finish()
            fold(out, (last.incoming, last.kept), how, spare=last.incoming)
            self._scratch.give(room)

        return finish

    def make_room(self, line: Axis, size: int) -> None:
        """Free what is kept between reductions, if a sum of slices of `size` bytes is too large for it."""
        near = sum(_shares(self.shared, line, rank, size) for rank in range(line.size) if rank != line.rank)
        self._scratch.make_room(size * (line.size - 1 - near))

    def release(self) -> None:
        """Let the system have the memory that is kept between reductions."""
        self._scratch.rest()
        self.shared.own.release()


@dataclass(frozen=True, slots=True)
class _Message:
    """A message under way."""

    work: dist.Work
    peer: int
    into: Tensor | None = None
    """Its destination, or a tensor of its size if it is read in place; None for a message to others."""
    start: Tensor | None = None
    """Its place in shared memory, which gloo brings; None without shared memory."""


class Post:
    """The messages of one collective between this rank and the others of its axis."""

    def __init__(self, carrier: Pairs, turn: StartedCollective, message: int, total: int) -> None:
        """Send `message` bytes at a time, `total` to each rank."""
        self._mesh, self._shared = carrier.mesh, carrier.shared
        self._turn, self.line = turn, turn.line
        digest = zlib.crc32(f"{turn.what} {message} {total}".encode()) % _TAGS
        self._tag = _FIRST_TAG + digest * _TAGS + turn.number % _TAGS
        size, rank = turn.line.size, turn.line.rank
        self.turns = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
        """(to, from): in each turn every rank sends one message and receives one."""
        self._posted: dict[int, list[_Message]] = {}
        """The messages of each batch."""
        self._borrowed: list[tuple[int, int]] = []
        """(rank, place) of messages that are read in place."""

    def send(self, tensor: Tensor, to: Sequence[int], batch: int = 0) -> None:
        """Send the same to each of several ranks."""
        near = [rank for rank in to if _shares(self._shared, self.line, rank, tensor.nbytes)]
        start = NOT_SHARED
        if near:
            with contextlib.suppress(OSError):
                start = self._shared.own.write(tensor.view(-1), near, self.line.size)
        for rank in to:
            if rank in near:
                self._send(torch.tensor(start), rank, batch)
            if rank not in near or start == NOT_SHARED:
                self._send(tensor, rank, batch)

    def _send(self, tensor: Tensor, to: int, batch: int) -> None:
        work = self._call(to, dist.isend, tensor, group=self.line.group, tag=self._tag, group_dst=to)
        self._posted.setdefault(batch, []).append(_Message(work, to))

    def receive(self, tensor: Tensor, source: int, batch: int = 0) -> None:
        """Receive into a tensor. In batch `IN_PLACE`, read a message of its size in place until
        `give_back`."""
        is_near = _shares(self._shared, self.line, source, tensor.nbytes)
        start = torch.tensor(NOT_SHARED) if is_near else None
        work = self._receive(tensor if start is None else start, source)
        self._posted.setdefault(batch, []).append(_Message(work, source, tensor, start))

    def _receive(self, tensor: Tensor, source: int) -> Any:
        places = {"group": self.line.group, "tag": self._tag, "group_src": source}
        return self._call(source, dist.irecv, tensor, **places)

    def _call(self, peer: int, function: Callable[..., Any], *args: Any, **places: Any) -> Any:
        """Call a function of torch.distributed; its errors name the peer."""
        with self._mesh.at(self._turn):
            try:
                return function(*args, **places)
            except RuntimeError as error:
                raise self.line.missing(self._turn.op, error, peer) from error

    def collect(self, batch: int) -> Iterator[tuple[int, Tensor]]:
        """Wait for a batch, and yield (source, tensor) of its messages."""
        for message in self._posted.pop(batch, []):
            self._call(message.peer, message.work.wait)
            if message.into is not None:
                start = NOT_SHARED if message.start is None else int(message.start)
                yield message.peer, self._arrived(message, message.into, start, in_place=batch == IN_PLACE)

    @torch.no_grad()
    def _arrived(self, message: _Message, into: Tensor, start: int, *, in_place: bool) -> Tensor:
        if message.start is None:
            return into
        if start == NOT_SHARED:
            into = torch.empty_like(into) if in_place else into
            self._call(message.peer, self._receive(into, message.peer).wait)
            return into
        memory = self._shared.peers[self.line.ranks[message.peer]]
        try:
            values = memory.read(start, into.nbytes, self.line.size).view(into.dtype)
        except OSError as error:
            raise self.line.missing(self._turn.op, error, message.peer) from error
        if in_place:
            self._borrowed.append((message.peer, start))
            return values
        into.copy_(values.view(into.shape))
        memory.done(start, self.line.rank)
        return into

    def give_back(self) -> None:
        """Tell the senders that borrowed messages are not read any more."""
        for peer, start in self._borrowed:
            self._shared.peers[self.line.ranks[peer]].done(start, self.line.rank)
        self._borrowed.clear()

    def finish(self) -> None:
        for batch in list(self._posted):
            for _ in self.collect(batch):
                pass


def _shares(shared: SharedMemory, line: Axis, rank: int, size: int) -> bool:
    """Return whether messages of this size, to and from this rank, go through shared memory."""
    return size >= LEAST and line.ranks[rank] in shared.peers
