"""Shared memory between ranks of a host: large messages are written once and read in place.

`pairs.py` decides which messages go to which rank. Ranks that cannot read each other's memory (another host,
container or user; a system without memfd) find out when the mesh starts, and exchange messages by gloo.

Invariant: a span is written only while no rank has to read it. A rank that dies leaves nothing behind: the
memory has no name and is freed with the last process that holds it.

[Note: shared memory] Each rank has one memfd, which is not part of /dev/shm and has none of its limits. Other
ranks open it at /proc/PID/fd/FD, which Linux grants to processes of the same user in the same PID namespace.
A message is a span of that memory: a line of flags, one byte per rank of the axis, then the values. The
sender takes the lowest gap that is large enough, writes, and sends the place by gloo, which arrives after the
values because it goes through the kernel. A reader sets its byte when it is done. The sender never waits for
readers: it looks at the bytes when it needs room. All waits are gloo's, so a rank that is gone, late, or in
another collective is noticed as without shared memory.

Memory stays after it was read, because fresh pages cost several times the copy: as much as was ever in use at
once, and at most KEPT between steps. Tools that count a process's pages include the memory that it has read
of other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import mmap
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

LINE = 64
"""The alignment of spans, in bytes."""
FIRST = mmap.PAGESIZE
"""The place of the first span, after the token."""
GROWTH = 1 << 20
"""The fewest bytes by which the memory grows."""
KEPT = 64 << 20
"""Bytes that are kept between steps."""
_NAME = "zerodrift"
_TOKEN = slice(0, 16)
"""The place of random bytes by which a rank's memory is known."""

_log = logging.getLogger("zerodrift")


class Address(NamedTuple):
    """The address of a rank's memory."""

    host: int
    """A number of the running system and its PID namespace, in which PIDs are unique."""
    process: int
    """The PID; 0 without memory that other ranks could read."""
    descriptor: int
    low: int
    """The first half of the memory's token, and `high` the second."""
    high: int


NOWHERE = Address(0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Span:
    """A message that was written, and may not have been read."""

    start: int
    stop: int
    ranks: int
    """Ranks of the axis, and flags at the start."""


class OwnMemory:
    """This rank's memory, which others read."""

    def __init__(self) -> None:
        self.written = 0
        """Bytes of messages so far, for measurements."""
        self._descriptor = -1
        self._size = 0
        self._mapped: mmap.mmap | None = None
        self._spans: list[_Span] = []
        """Sorted by place."""

    def address(self) -> Address:
        """Return the address, of new memory if there is none yet; `NOWHERE` if the system has no memfd."""
        host = _host()
        if not host:
            return NOWHERE
        if self._descriptor < 0:
            try:
                self._descriptor = os.memfd_create(_NAME)
                self._grow(FIRST)
            except OSError:
                self.close()
                return NOWHERE
            self._bytes[_TOKEN] = os.urandom(16)
        return Address(host, os.getpid(), self._descriptor, *_token(self._bytes))

    @property
    def _bytes(self) -> mmap.mmap:
        assert self._mapped is not None
        return self._mapped

    @torch.no_grad()
    def write(self, values: torch.Tensor, readers: Collection[int], ranks: int) -> int:
        """Write flat `values` for some of `ranks` ranks to read; return the place. OSError without room."""
        head = _up(ranks, LINE)
        self._forget_what_was_read()
        start = FIRST  # the lowest place with room between spans that others may still read
        for span in self._spans:
            if span.start - start >= head + values.nbytes:
                break
            start = _up(span.stop, LINE)
        stop = start + head + values.nbytes
        if stop > self._size:
            self._grow(_up(max(stop, self._size + GROWTH), mmap.PAGESIZE))
        self._bytes[start : start + ranks] = bytes(rank not in readers for rank in range(ranks))
        _values(self._bytes, start + head, values.nbytes).view(values.dtype).copy_(values)
        self.written += values.nbytes * len(readers)
        self._spans.append(_Span(start, stop, ranks))
        self._spans.sort(key=lambda span: span.start)
        return start

    def _forget_what_was_read(self) -> None:
        read = (0 not in self._bytes[span.start : span.start + span.ranks] for span in self._spans)
        self._spans = [span for span, done in zip(self._spans, read, strict=True) if not done]

    def _grow(self, size: int) -> None:
        # Allocated now: a page that is missing later would end the process.
        os.posix_fallocate(self._descriptor, self._size, size - self._size)
        self._mapped, self._size = mmap.mmap(self._descriptor, size), size

    def release(self) -> None:
        """Free what is beyond KEPT and no rank has to read."""
        if self._size <= FIRST + KEPT:
            return
        self._forget_what_was_read()
        size = _up(max([FIRST + KEPT, *(span.stop for span in self._spans)]), mmap.PAGESIZE)
        if size < self._size:
            # Other ranks have the old length mapped, and do not read behind the new end.
            os.ftruncate(self._descriptor, size)
            self._mapped, self._size = mmap.mmap(self._descriptor, size), size

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        self._mapped, self._spans, self._size = None, [], 0
        if descriptor >= 0:
            os.close(descriptor)


class PeerMemory:
    """Another rank's memory, which this one reads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._bytes = mmap.mmap(descriptor, FIRST)
        self.token = _token(self._bytes)

    def read(self, start: int, size: int, ranks: int) -> torch.Tensor:
        """Return the bytes of a message of this size, in place."""
        first = start + _up(ranks, LINE)
        if first + size > len(self._bytes):
            self._bytes = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return _values(self._bytes, first, size)

    def done(self, start: int, reader: int) -> None:
        """Let the sender overwrite the message."""
        self._bytes[start + reader] = 1

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The memory of this rank, and by world rank that of those with which it shares."""

    own: OwnMemory
    peers: dict[int, PeerMemory]

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()
        self.own.close()


def share(group: dist.ProcessGroup, rank: int, ranks: int) -> SharedMemory | None:
    """Find out which ranks can read each other's memory. All ranks of the group call it.

    Two ranks share if both can read. Return None if this rank shares with none.
    """
    own = OwnMemory()
    mine = own.address()

    def from_all(values: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.zeros_like(values) for _ in range(ranks)]
        dist.all_gather(gathered, values, group=group)
        return gathered

    addresses = [Address(*words.tolist()) for words in from_all(torch.tensor(mine))]
    found = {
        other: memory
        for other, address in enumerate(addresses)
        if other != rank and address != mine and (memory := reach(address)) is not None
    }
    seen = torch.zeros(ranks, dtype=torch.uint8)
    seen[list(found)] = 1
    seen_by = [bool(sees[rank]) for sees in from_all(seen)]
    peers = {other: memory for other, memory in found.items() if seen_by[other]}
    for other in found.keys() - peers.keys():
        found[other].close()
    here = [other for other, address in enumerate(addresses) if address.host == mine.host and other != rank]
    unreadable = [other for other in here if other not in peers] if mine != NOWHERE else []
    if unreadable:
        _log.warning(
            "zerodrift: rank %d and rank %d of one machine cannot read each other's memory: they exchange "
            "through sockets, with the same bits, slower",
            rank,
            unreadable[0],
        )
    if not peers:
        own.close()
        return None
    return SharedMemory(own, peers)


def reach(address: Address) -> PeerMemory | None:
    """Return the memory of another process; None if it cannot be read from here."""
    if not address.process or address.host != _host():
        return None
    place = f"/proc/{address.process}/fd/{address.descriptor}"
    with contextlib.suppress(OSError):
        # Other files are not opened: that can have effects.
        if os.readlink(place).startswith(f"/memfd:{_NAME}"):
            memory = PeerMemory(os.open(place, os.O_RDWR | os.O_CLOEXEC))
            if memory.token == address[-2:]:
                return memory
            memory.close()
    return None


def can_share() -> bool:
    """Return whether this process can open memory by its address, tried on its own."""
    own = OwnMemory()
    found = reach(own.address())
    if found is not None:
        found.close()
    own.close()
    return found is not None


@functools.cache
def _host() -> int:
    """Return a number of the running system and PID namespace; 0 without what Linux has."""
    if not hasattr(os, "memfd_create"):
        return 0
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text()
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        return 0
    digest = hashlib.sha256(f"{system} {processes}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _token(memory: mmap.mmap) -> tuple[int, int]:
    first, second = struct.unpack("=2q", memory[_TOKEN])
    return first, second


def _values(memory: mmap.mmap, start: int, size: int) -> torch.Tensor:
    """Return bytes as a tensor, which nobody keeps: it is not counted among the tensors of a rank."""
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
