"""Recursive halving: how sums by the tree travel between ranks that are a power of two.

[Note: halving] In the first swap a rank and the one N / 2 further swap the halves of their buffers that
hold each other's slice, and both add what arrives to the half that they keep; in the next, ranks N / 4 apart
do so with quarters, until a rank has its own slice and one part to add to it. That is log2(N) messages and
additions of N - 1 slices in all, where everybody's slice to everybody is N - 1 of each, and buffers of a half
and a quarter. Which ranks' sums meet first is the tree of `mesh.tree_place`: those whose number differs in
the highest bit. What arrives becomes the running sum: left + right is right + left to the bit, and the
caller's buffer is only read.

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


def room_for(full: torch.Tensor) -> int:
    """Elements in which `swaps` of a buffer receive: a half of it, and a quarter."""
    return full.numel() // 2 + full.numel() // 4


@torch.no_grad()
def swaps(full: torch.Tensor, rank: int, ranks: int, room: torch.Tensor) -> Iterator[Swap]:
    """The swaps of a rank, each to be done before the next is asked for. After the last, the sum of the
    rank's slice is `coming + kept`."""
    running, distance = full, ranks // 2
    half = full.numel() // 2
    for free in itertools.cycle((room[:half], room[half:])):
        lower, upper = running.chunk(2)
        kept, going = (upper, lower) if rank & distance else (lower, upper)
        coming = free[: kept.numel()]
        yield Swap(rank ^ distance, going, coming, kept)
        if distance == 1:
            return
        running, distance = coming.add_(kept), distance // 2
