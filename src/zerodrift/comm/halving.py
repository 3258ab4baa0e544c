"""Recursive halving: how sums by the tree travel between ranks that are a power of two.

[Note: halving] In the first swap a rank and its neighbour, which differs in the lowest bit of its number,
send each other the slices of all ranks that have the other's bit, and both add what arrives to the rest; in
the next, ranks 2 apart do so with half of those, until a rank has its own slice and one part to add to it.
That is log2(N) messages and additions, of N - 1 slices in all, where everybody's slice to everybody is N - 1
of each. The sums that meet first are of neighbours, which is the tree over ranks, and most bytes go to the
nearest ranks, half of them to the neighbour: of machines of 8, an eighth leaves one. The other way round,
halves to the rank that is furthest away, what is sent would be neighbouring slices, and need no copy; but
nearly all of it would leave the machine, and the tree would have ranks in the order of their reversed bits.

What arrives becomes the running sum: left + right is right + left to the bit, and the caller's buffer is only
read.

Nothing is rounded on the way where sums travel in the dtype in which they are formed, and only then.

Invariant: pure arithmetic on tensors; ranks that follow `swaps` to the end have the bits of `fold`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Swap:
    """What two ranks swap."""

    partner: int
    going: torch.Tensor
    """To the partner."""
    coming: torch.Tensor
    """Room for what the partner sends, which is to be added to `kept`."""
    kept: torch.Tensor
    """Of the last swap as flat as what arrives."""


def room_for(full: torch.Tensor) -> int:
    """Elements that the swaps of a buffer need: for a half that comes and a half that goes."""
    return full.numel()


@torch.no_grad()
def swaps(full: torch.Tensor, rank: int, ranks: int, room: torch.Tensor) -> Iterator[Swap]:
    """The swaps of a rank, each to be done before the next is asked for. After the last, the sum of the
    rank's slice is `coming + kept`."""
    running, distance = full, 1
    coming_to, going_to = room.chunk(2)
    free = itertools.cycle((going_to, coming_to))
    while True:
        slices = running.view(-1, 2, full.numel() // ranks)
        bit = 1 if rank & distance else 0
        kept, going = slices[:, bit], slices[:, 1 - bit]
        if not going.is_contiguous():
            going = going_to[: going.numel()].view_as(going).copy_(going)
        coming = coming_to[: kept.numel()].view_as(kept)
        yield Swap(
            rank ^ distance, going.view(-1), coming.view(-1), kept.view(-1) if len(kept) == 1 else kept
        )
        if len(kept) == 1:
            return
        running, distance = coming.add_(kept).view(-1), 2 * distance
        coming_to, going_to = next(free).chunk(2)
