"""How `fully_shard` cuts a parameter: on its first dimension, into equal runs of rows of which the last ones
may be short or empty.

Such a run is a run of elements of the row-major flattening, which is how everything else here sees it.

Invariant: the cuts of all ranks are every element once, in rank order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from zerodrift.comm.collectives import Collectives


@dataclass(frozen=True, slots=True)
class ShardRange:
    """One rank's part of a parameter."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """First element, in the row-major flattening."""
    stop: int
    chunk: int
    """Elements of the longest part: what travels, padding included."""

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """`[numel]`: the part of a whole tensor, as a view where the tensor is contiguous."""
        return whole.reshape(-1)[self.start : self.stop]


def shard_range(shape: tuple[int, ...], ranks: int, rank: int) -> ShardRange:
    inner = math.prod(shape[1:])
    rows = -(-shape[0] // ranks)
    start, stop = (min(shape[0], rows * number) * inner for number in (rank, rank + 1))
    return ShardRange(shape, start, stop, rows * inner)


def whole_of(cut: ShardRange, mine: torch.Tensor, comm: Collectives) -> torch.Tensor:
    """The whole parameter, of which `mine` is `[numel]` on each rank of the shard axis."""
    ranks = comm.mesh.size("shard")
    if ranks == 1:
        return mine.clone().view(cut.shape)
    padded = padded_to(mine, cut.chunk)
    whole = padded.new_empty(cut.chunk * ranks)
    comm.all_gather(whole, padded, "shard")
    return whole[: math.prod(cut.shape)].view(cut.shape)


def padded_to(flat: torch.Tensor, numel: int) -> torch.Tensor:
    """The same values in a buffer of at least their length, zeros behind them."""
    if flat.numel() == numel:
        return flat.contiguous()
    padded = flat.new_zeros(numel)
    padded[: flat.numel()] = flat
    return padded
