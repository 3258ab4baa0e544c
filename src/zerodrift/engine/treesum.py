"""Sums of flat buffers that come one by one, by the binary tree of `comm/fold.py`.

What a rank keeps of a step's micro-batches under `reduce.order: tree`: of m at most log2(m + 1) buffers.

Invariant: the sum of n buffers is `additions(n)` of them, whatever their number turns out to be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from zerodrift.comm.fold import carries, leftovers


class TreeSum:
    """Owns what is added to it; `give` takes what it has no use for any more."""

    def __init__(self, give: Callable[[torch.Tensor], None]) -> None:
        self._give = give
        self._sums: dict[int, torch.Tensor] = {}
        """First part -> sum, of the sums that wait for others."""
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._count)

    @property
    def count(self) -> int:
        """How many parts have come."""
        return self._count

    def add(self, part: torch.Tensor) -> None:
        self._sums[self._count] = part
        self._add(carries(self._count))
        self._count += 1

    @property
    def neighbour(self) -> torch.Tensor | None:
        """The part that the next one is added to first, where it is a part and no sum; then a caller who has
        the next one in pieces may add them there and say `added`."""
        return self._sums[self._count - 1] if self._count % 2 else None

    def added(self) -> None:
        """The next part is in `neighbour`."""
        self._add(itertools.islice(carries(self._count), 1, None))
        self._count += 1

    def take(self) -> torch.Tensor:
        """The whole sum, in the buffer of its first part; from now on there is nothing."""
        self._add(leftovers(self._count))
        self._count = 0
        return self._sums.pop(0)

    def drop(self) -> list[torch.Tensor]:
        """The buffers of all sums, in the order of their parts; from now on there is nothing."""
        self._count = 0
        held = list(self._sums.values())
        self._sums.clear()
        return held

    @torch.no_grad()
    def _add(self, pairs: Iterator[tuple[int, int]]) -> None:
        for left, right in pairs:
            part = self._sums.pop(right)
            self._sums[left].add_(part)
            self._give(part)
