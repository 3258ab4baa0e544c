"""Blocks of like length in one micro-batch, which is then only as long as its longest: little padding.

A window of steps takes the blocks that it would take anyway, ordered by length and dealt to its steps in an
order that is drawn anew for each window. So every block still comes once in an epoch, and what a step sees
depends on its number alone: not on ranks, and not on where a run was stopped.

Invariant: what is cut off a micro-batch is behind the last label of each of its blocks.
"""

from __future__ import annotations

import os

import numpy as np

from zerodrift.files import opened
from zerodrift.train.data.blocks import LEARNED, Blocks
from zerodrift.train.data.mixture import Mixture, MixtureSampler
from zerodrift.train.data.sampling import BlockSampler, mixed, permuted
from zerodrift.train.data.texts import readable

WINDOW = 50
"""Steps whose blocks are ordered together."""
MULTIPLE = 8
"""Of tokens, to which a micro-batch is filled up: GPUs compute other shapes slowly."""
_ROWS = 4096


def lengths_of(blocks: Blocks | Mixture) -> np.ndarray:
    """Tokens of each block up to its last label: what follows is seen by no token that is learned."""
    if isinstance(blocks, Mixture):
        return np.concatenate([lengths_of(each) for each in blocks.sets])
    full = np.full(len(blocks), blocks.length, dtype=np.int64)
    marks = blocks.marks
    if marks is None:
        return full
    with readable(marks.file), opened(marks.file) as stream:
        for first in range(0, len(blocks), _ROWS):
            count = min(_ROWS, len(blocks) - first)
            data = os.pread(stream.fileno(), count * marks.length, marks.offset + first * marks.length)
            learned = np.frombuffer(data, np.uint8).reshape(count, marks.length) & LEARNED
            full[first : first + count] -= np.argmax(learned[:, ::-1], axis=1)
    return full


class GroupedSampler:
    """The order of another sampler, with blocks of like length side by side."""

    def __init__(self, order: BlockSampler | MixtureSampler, lengths: np.ndarray, seed: int) -> None:
        self.lengths = lengths
        self._order, self._seed = order, seed
        self._held: tuple[tuple[int, int], np.ndarray] = ((-1, 0), np.empty(0))

    def step(self, number: int, samples: int) -> np.ndarray:
        """The blocks of optimizer step `number`, counted from 0, the longest first."""
        first, size = window(number, samples, len(self.lengths))
        if self._held[0] != (first, samples):
            chosen = np.concatenate([self._order.step(first + at, samples) for at in range(size)])
            ordered = chosen[np.argsort(-self.lengths[chosen], kind="stable")].reshape(size, samples)
            key = mixed(self._seed * 0x9E3779B97F4A7C15 + mixed(first))
            dealt = [permuted(at, size, key) for at in range(size)]
            self._held = ((first, samples), ordered[dealt])
        return self._held[1][number - first]

    def padded(self, chosen: np.ndarray, most: int) -> int:
        """The length of a micro-batch of these blocks."""
        return min(most, -(-int(self.lengths[chosen].max()) // MULTIPLE) * MULTIPLE)


def padding(sampler: GroupedSampler, steps: int, samples: int, micro: int, most: int) -> tuple[float, float]:
    """The share of what is computed in the first steps that is padding: as it is, and with whole blocks."""
    used = cut = 0
    for number in range(steps):
        chosen = sampler.step(number, samples)
        used += int(sampler.lengths[chosen].sum())
        cut += sum(micro * sampler.padded(chosen[at : at + micro], most) for at in range(0, samples, micro))
    return 1 - used / cut, 1 - used / (steps * samples * most)


def window(number: int, samples: int, count: int) -> tuple[int, int]:
    """The first step and the steps of the window that a step is in. None reaches over the end of an epoch of
    `count` blocks: a step that does is by itself."""
    epoch = number * samples // count
    first, end = -(-epoch * count // samples), (epoch + 1) * count // samples
    if not first <= number < end:
        return number, 1
    start = first + (number - first) // WINDOW * WINDOW
    return start, min(WINDOW, end - start)
