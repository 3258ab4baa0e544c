"""Buffers that gradients accumulate in, and their sums by a tree.

Invariants: a buffer is in one pool or in use, never both, and holds anything when it is taken. The tree sum
of n buffers is `additions(n)` of them, whatever n turns out to be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from zerodrift.comm import carries, leftovers


class BufferPool:
    """Flat buffers that segments of one size take turns in. Fresh memory costs a page fault per 4 KiB: as
    much as what is then done with it."""

    def __init__(self, *, one_size: bool) -> None:
        """Free buffers go as soon as another size is asked for if `one_size`: for buffers that are full for a
        moment only, of which there would be one for every size there is."""
        self._one_size = one_size
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer with anything in it."""
        free = self._free.get((numel, dtype))
        if free:
            return free.pop()
        if self._one_size:
            self._free.clear()
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, flat: torch.Tensor) -> None:
        self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)

    def clear(self) -> None:
        self._free.clear()


class GradientBuffers:
    """The plan's accumulators, and all other buffers of gradients."""

    def __init__(self, *, keep: bool) -> None:
        self.sums = BufferPool(one_size=not keep)
        self.spare = BufferPool(one_size=True)
        self._keep = keep

    def end_step(self) -> None:
        """Free spare memory, and the accumulators' too unless the plan keeps it."""
        self.spare.clear()
        if not self._keep:
            self.sums.clear()


class TreeSum:
    """The sum of a rank's micro-batches under `reduce.order: tree`, by the binary tree of `comm/fold.py`. It
    holds at most log2(m + 1) buffers of m micro-batches, owns what is added to it, and returns a buffer that
    it has no more use for to `give`."""

    def __init__(self, give: Callable[[torch.Tensor], None]) -> None:
        self._give = give
        self._sums: dict[int, torch.Tensor] = {}
        self.count = 0

    def __bool__(self) -> bool:
        return bool(self.count)

    def add(self, part: torch.Tensor) -> None:
        self._sums[self.count] = part
        self._add(carries(self.count))
        self.count += 1

    @property
    def neighbour(self) -> torch.Tensor | None:
        """The part that the next one is added to first, if it is a single part."""
        return self._sums[self.count - 1] if self.count % 2 else None

    def added(self) -> None:
        """Count a part that was added to `neighbour` in place."""
        self._add(itertools.islice(carries(self.count), 1, None))
        self.count += 1

    def take(self) -> torch.Tensor:
        """Return the whole sum, in the buffer of its first part, and begin anew."""
        self._add(leftovers(self.count))
        self.count = 0
        return self._sums.pop(0)

    def drop(self) -> list[torch.Tensor]:
        """Return the buffers of all partial sums, in the order of their parts, and begin anew."""
        self.count = 0
        held = list(self._sums.values())
        self._sums.clear()
        return held

    @torch.no_grad()
    def _add(self, pairs: Iterator[tuple[int, int]]) -> None:
        for left, right in pairs:
            part = self._sums.pop(right)
            self._sums[left].add_(part)
            self._give(part)
