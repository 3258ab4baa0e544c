"""Which blocks a step sees: a function of the seed and of how many samples came before, and of nothing else.

An epoch is a permutation of the blocks that is computed and not stored, so a data set of any size costs no
memory and any place in any epoch is reached at once. The engine deals a step's micro-batches to ranks, so
the samples of a step are the same for every number of ranks.

Invariant: within an epoch every block comes exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROUNDS = 6
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class BlockSampler:
    """The order of `count` blocks, epoch after epoch."""

    count: int
    seed: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise AssertionError("a sampler needs blocks")

    def at(self, position: int) -> int:
        """The block of a sample, counted from the start of training."""
        epoch, place = divmod(position, self.count)
        return permuted(place, self.count, mixed(self.seed * 0x9E3779B97F4A7C15 + epoch))

    def step(self, number: int, samples: int) -> np.ndarray:
        """The blocks of optimizer step `number`, counted from 0, which takes `samples` of them."""
        return np.array([self.at(number * samples + sample) for sample in range(samples)], dtype=np.int64)


def blocks_of(indices: np.ndarray, micro_batch: int, size: int) -> np.ndarray:
    """What of a step's blocks is its micro-batch of a number, over all ranks: `size` blocks."""
    return indices[micro_batch * size : (micro_batch + 1) * size]


def permuted(place: int, count: int, key: int) -> int:
    """Where `place` goes in a permutation of `range(count)`.

    A Feistel network permutes the next power of four; what falls outside is sent through again until it
    falls inside, which keeps it a permutation.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for turn in range(ROUNDS):
            left, right = right, left ^ (mixed(key ^ (right * ROUNDS + turn)) & low)
        place = left << half | right
        if place < count:
            return place


def mixed(value: int) -> int:
    """SplitMix64's finisher: every bit of the input changes half of those of the output."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
