"""Several sets of blocks as one, of which each gives its share of what is trained on.

Invariant: which block a sample is depends on its number alone. Of as many samples as there are blocks in all,
each set gives its share to within one; and of each set every block comes once before any comes again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zerodrift.train.data.blocks import Blocks, Read
from zerodrift.train.data.sampling import BlockSampler, mixed, permuted


@dataclass(frozen=True)
class Mixture:
    """Blocks of several sets, numbered one set after the other."""

    sets: tuple[Blocks, ...]
    weights: tuple[float, ...]

    @property
    def length(self) -> int:
        return self.sets[0].length

    @property
    def apart(self) -> bool:
        return any(blocks.apart for blocks in self.sets)

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """How many labels each of these blocks has."""
        return np.array([int(self.sets[of].labels(np.array([at]))[0]) for of, at in self._places(indices)])

    def read(self, indices: np.ndarray) -> Read:
        read = [self.sets[of].read(np.array([at])) for of, at in self._places(indices)]
        places = [np.arange(self.length)[None] if one.positions is None else one.positions for one in read]
        return Read(
            np.concatenate([one.tokens for one in read]),
            np.concatenate([one.labels for one in read]),
            np.concatenate(places) if self.apart else None,
        )

    def _places(self, indices: np.ndarray) -> list[tuple[int, int]]:
        ends = np.cumsum([len(blocks) for blocks in self.sets])
        sets = np.searchsorted(ends, indices, side="right")
        starts = ends - [len(blocks) for blocks in self.sets]
        return [(int(of), int(index - starts[of])) for of, index in zip(sets, indices, strict=True)]


@dataclass(frozen=True, slots=True)
class MixtureSampler:
    """The order of blocks of several sets, of `counts` blocks each."""

    counts: tuple[int, ...]
    shares: tuple[int, ...]
    """Of as many samples as there are blocks in all, how many are of each set."""
    seed: int

    def at(self, position: int) -> int:
        """The block of a sample, counted from the start of training."""
        total = sum(self.counts)
        turn, place = divmod(position, total)
        place = permuted(place, total, mixed(self.seed * 0x9E3779B97F4A7C15 + turn))
        first = 0
        for number, (count, share) in enumerate(zip(self.counts, self.shares, strict=True)):
            if place < share:
                own = BlockSampler(count, mixed(self.seed + number + 1))
                return first + own.at(turn * share + place)
            place -= share
            first += count
        raise AssertionError("shares must add up to the blocks in all")

    def step(self, number: int, samples: int) -> np.ndarray:
        """The blocks of optimizer step `number`, counted from 0, which takes `samples` of them."""
        return np.array([self.at(number * samples + sample) for sample in range(samples)], dtype=np.int64)


def sampler_of(blocks: Blocks | Mixture, seed: int) -> BlockSampler | MixtureSampler:
    """The order in which blocks are trained on."""
    if isinstance(blocks, Blocks):
        return BlockSampler(len(blocks), seed)
    counts = tuple(map(len, blocks.sets))
    return MixtureSampler(counts, shares(counts, blocks.weights), seed)


def shares(counts: tuple[int, ...], weights: tuple[float, ...]) -> tuple[int, ...]:
    """Of as many samples as there are blocks in all, how many are of each set: at least one of each."""
    total = sum(counts)
    wanted = np.array(weights) / sum(weights) * total
    given = np.maximum(1, np.floor(wanted)).astype(np.int64)
    while given.sum() < total:
        given[np.argmax(wanted - given)] += 1
    while given.sum() > total:
        given[np.argmax(np.where(given > 1, given - wanted, -np.inf))] -= 1
    return tuple(int(count) for count in given)
