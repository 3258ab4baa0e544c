"""CUDA's caching allocator, as plain arithmetic on sizes: what a sequence of allocations reserves.

It follows c10/cuda/CUDACachingAllocator.cpp with its default options. A request is rounded to 512 bytes and
takes the best fit among the free blocks of its stream, in the pool of small or of large blocks. Without one,
a segment comes from the device. What a block has too much is split off if it is worth it, and neighbours that
are both free are merged. Segments return to the device only where it has no memory left.

Invariant: blocks of a segment lie side by side without a gap, and no two free ones touch.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.device.dry import Entry

MIN_BLOCK = 512
SMALL = 1 << 20
"""Bytes of the largest allocation in the pool of small blocks."""
SMALL_BUFFER = 2 << 20
"""Bytes of a segment of that pool."""
MIN_LARGE = 10 << 20
"""Bytes from which on an allocation gets a segment of its own."""
LARGE_BUFFER = 20 << 20
"""Bytes of a segment for allocations below `MIN_LARGE`."""
ROUND_LARGE = 2 << 20
"""Bytes of which larger segments are a multiple."""


class OutOfMemory(MemoryError):  # noqa: N818 (torch's name)
    """The device has too little memory, after everything that is cached was returned to it."""


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment."""

    address: int
    size: int
    pool: tuple[bool, int]
    """(small, stream)."""
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass(frozen=True, slots=True)
class Usage:
    """Peak memory and requests of a part of a run, in bytes."""

    allocated: int
    """Largest sum of live allocations."""
    reserved: int
    """Largest sum of segments."""
    allocations: int
    """Number of requests."""
    segments: int
    """Requests that no free block could serve."""

    @property
    def fragmentation(self) -> float:
        """Return the share of the reserved memory that was never in use at once."""
        return 1 - self.allocated / self.reserved

    @property
    def reuse(self) -> float:
        """Return the share of requests that reserved memory could serve."""
        return 1 - self.segments / self.allocations


class CachingAllocator:
    """The allocator of one device."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._free: dict[tuple[bool, int], list[tuple[int, int]]] = defaultdict(list)
        self._blocks: dict[int, Block] = {}
        """Free blocks, by address."""
        self._used: dict[str, Block] = {}
        self._end = 0
        self.allocated = self.reserved = self.flushes = 0
        self.begin()

    def begin(self) -> None:
        """Reset the counts; memory stays as it is."""
        self._most = [self.allocated, self.reserved]
        self._requests = self._segments = 0

    @property
    def usage(self) -> Usage:
        return Usage(*self._most, self._requests, self._segments)

    def play(self, entries: Iterable[Entry]) -> None:
        """Allocate and free as recorded; earlier allocations do not count."""
        for entry in entries:
            if entry.what == "allocation":
                self.allocate(entry.name, entry.size, entry.stream)
            elif entry.what == "free" and entry.name in self._used:
                self.free(entry.name)

    def allocate(self, name: str, bytes_: int, stream: int = 0) -> None:
        size = max(1, -(-bytes_ // MIN_BLOCK)) * MIN_BLOCK
        pool = (size <= SMALL, stream)
        self._requests += 1
        place = bisect.bisect_left(self._free[pool], (size, 0))
        if place < len(self._free[pool]):
            block = self._take(self._blocks[self._free[pool][place][1]])
        else:
            block = self._segment(size, pool)
        rest = block.size - size
        if rest >= MIN_BLOCK if pool[0] else rest > SMALL:
            after = Block(block.address + size, rest, pool, before=block, after=block.after)
            if block.after is not None:
                block.after.before = after
            block.after, block.size = after, size
            self._put(after)
        self._used[name] = block
        self.allocated += block.size
        self._most[0] = max(self._most[0], self.allocated)

    def free(self, name: str) -> None:
        block = self._used.pop(name)
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._take(other)
                left, right = sorted((block, other), key=lambda each: each.address)
                left.size, left.after = left.size + right.size, right.after
                if right.after is not None:
                    right.after.before = left
                block = left
        self._put(block)

    def _segment(self, size: int, pool: tuple[bool, int]) -> Block:
        room = SMALL_BUFFER if pool[0] else LARGE_BUFFER
        if size >= MIN_LARGE:
            room = -(-size // ROUND_LARGE) * ROUND_LARGE
        self._segments += 1
        if self._capacity is not None and self.reserved + room > self._capacity:
            self.flushes += 1
            self.empty_cache()
            if self.reserved + room > self._capacity:
                raise OutOfMemory(f"{room} bytes on a device that has {self._capacity - self.reserved} left")
        self._end, address = self._end + room + ROUND_LARGE, self._end  # no two segments touch
        self.reserved += room
        self._most[1] = max(self._most[1], self.reserved)
        return Block(address, room, pool)

    def empty_cache(self) -> None:
        """Return every segment to the device that is free as a whole."""
        for block in list(self._blocks.values()):
            if block.before is None and block.after is None:
                self._take(block)
                self.reserved -= block.size

    def _put(self, block: Block) -> None:
        block.is_free = True
        self._blocks[block.address] = block
        bisect.insort(self._free[block.pool], block.key)

    def _take(self, block: Block) -> Block:
        block.is_free = False
        del self._blocks[block.address]
        held = self._free[block.pool]
        del held[bisect.bisect_left(held, block.key)]
        return block

    def require_whole(self) -> None:
        """Raise an error for a broken invariant."""
        blocks = {id(block): block for block in (*self._blocks.values(), *self._used.values())}
        assert sum(block.size for block in blocks.values()) == self.reserved
        for one, other in itertools.pairwise(sorted(blocks.values(), key=lambda each: each.address)):
            touch = one.address + one.size == other.address
            assert one.after is (other if touch else None) and (one if touch else None) is other.before
            assert not (touch and one.is_free and other.is_free)
