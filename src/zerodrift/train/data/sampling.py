"""Choose the blocks of a step, and make micro-batches of them.

The blocks depend on the seed and the number of samples before the step. An epoch is a permutation, which is
computed and not stored: it takes no memory for a data set of any size, and any place in any epoch is reached
at once. The engine deals the micro-batches of a step to ranks, so the samples are the same on any number of
ranks. Several sets are mixed by weight. Blocks of similar length may share a micro-batch, to save padding.

Every block comes exactly once in an epoch. In a mixture, an epoch has as many samples as there are blocks:
each set gives its share to within one, and every block of a set comes once before any comes again.

The gradient of a step is the mean over all its labels on all ranks, so a micro-batch with few labels has a
small weight. Every rank knows the labels of a step from the counts of the blocks, without communication.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from zerodrift.files import opened
from zerodrift.kernels import mix_bits
from zerodrift.train.data.blocks import IGNORED, LEARNED, Blocks, BlockValues
from zerodrift.train.data.formats import readable

ROUNDS = 6
WINDOW = 50
"""Steps whose blocks are ordered by length together."""
MULTIPLE = 8
"""The length of a micro-batch is a multiple of this: GPUs compute other shapes slowly."""
_ROWS = 4096


class BlockSampler:
    """The order of `count` blocks, epoch after epoch.

    Blocks may belong to several `sets`, each with its number of blocks and its share of an epoch.
    """

    def __init__(self, count: int, seed: int, sets: Sequence[tuple[int, int]] = ()) -> None:
        self._count, self._seed = count, seed
        self._sets = [
            (BlockSampler(blocks, mix_bits(seed + number)), share)
            for number, (blocks, share) in enumerate(sets, 1)
        ]

    def at(self, position: int) -> int:
        """Return the block of a sample, counted from the start of training."""
        epoch, place = divmod(position, self._count)
        place, first = permute(place, self._count, epoch_key(self._seed, epoch)), 0
        for sampler, share in self._sets:
            if place < share:
                return first + sampler.at(epoch * share + place)
            place, first = place - share, first + sampler._count
        return place

    def step(self, number: int, samples: int) -> np.ndarray:
        """Return the `samples` blocks of step `number`, counted from 0."""
        return np.array([self.at(number * samples + sample) for sample in range(samples)], dtype=np.int64)


def permute(place: int, count: int, key: int) -> int:
    """Return where `place` goes in a permutation of `range(count)`.

    A Feistel network permutes the next power of four. A result outside the range goes through again.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = place >> half, place & low
        for turn in range(ROUNDS):
            left, right = right, left ^ (mix_bits(key ^ (right * ROUNDS + turn)) & low)
        place = left << half | right
        if place < count:
            return place


def epoch_key(seed: int, epoch: int) -> int:
    return mix_bits(seed * 0x9E3779B97F4A7C15 + epoch)


@dataclass(frozen=True)
class Mixture:
    """Blocks of several sets or files, numbered one after the other."""

    sets: tuple[Blocks | Mixture, ...]
    weights: tuple[float, ...] = ()
    """Weight of each set in an epoch. Without weights every block comes once."""

    @property
    def length(self) -> int:
        return self.sets[0].length

    @property
    def separate_documents(self) -> bool:
        return any(blocks.separate_documents for blocks in self.sets)

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    def split(self, share: float) -> tuple[Mixture, Mixture]:
        """Split off the last `share` of the blocks of each set."""
        first, last = zip(*(each.split(share) for each in self.sets), strict=True)
        return Mixture(first), Mixture(last)

    def labels(self, indices: np.ndarray) -> np.ndarray:
        return np.array([int(blocks.labels(at)[0]) for blocks, at in self._places(indices)])

    def read(self, indices: np.ndarray) -> BlockValues:
        read = [blocks.read(at) for blocks, at in self._places(indices)]
        positions = [np.arange(self.length)[None] if one.positions is None else one.positions for one in read]
        return BlockValues(
            np.concatenate([one.tokens for one in read]),
            np.concatenate([one.labels for one in read]),
            np.concatenate(positions) if self.separate_documents else None,
        )

    def _places(self, indices: np.ndarray) -> list[tuple[Blocks | Mixture, np.ndarray]]:
        """Return the set of each block, and its number there. Shape [1]."""
        ends = np.cumsum([len(blocks) for blocks in self.sets])
        numbers = np.searchsorted(ends, indices, side="right")
        sets = [self.sets[number] for number in numbers]
        starts = ends[numbers] - list(map(len, sets))
        return list(zip(sets, (indices - starts)[:, None], strict=True))


def joined(sets: Sequence[Blocks | Mixture]) -> Blocks | Mixture | None:
    return Mixture(tuple(sets)) if len(sets) > 1 else next(iter(sets), None)


def sampler_of(blocks: Blocks | Mixture, seed: int) -> BlockSampler:
    """Return the order in which blocks are trained on."""
    if isinstance(blocks, Blocks) or not blocks.weights:
        return BlockSampler(len(blocks), seed)
    counts = tuple(map(len, blocks.sets))
    shares = divide_by_weight(counts, blocks.weights)
    return BlockSampler(len(blocks), seed, list(zip(counts, shares, strict=True)))


def divide_by_weight(counts: tuple[int, ...], weights: tuple[float, ...]) -> tuple[int, ...]:
    """Divide as many samples as there are blocks by weight, at least one for each set."""
    total = sum(counts)
    wanted = np.array(weights) / sum(weights) * total
    given = np.maximum(1, np.floor(wanted)).astype(np.int64)
    while given.sum() < total:
        given[np.argmax(wanted - given)] += 1
    while given.sum() > total:
        given[np.argmax(np.where(given > 1, given - wanted, -np.inf))] -= 1
    return tuple(int(count) for count in given)


def lengths_of(blocks: Blocks | Mixture) -> np.ndarray:
    """Return the tokens of each block up to its last label: no learned token sees what follows."""
    if isinstance(blocks, Mixture):
        return np.concatenate([lengths_of(each) for each in blocks.sets])
    lengths, marks = np.full(len(blocks), blocks.length, dtype=np.int64), blocks.marks
    if marks is None:
        return lengths
    with readable(marks.file), opened(marks.file) as stream:
        for first in range(0, len(blocks), _ROWS):
            count = min(_ROWS, len(blocks) - first)
            data = os.pread(stream.fileno(), count * marks.length, marks.offset + first * marks.length)
            learned = np.frombuffer(data, np.uint8).reshape(count, marks.length) & LEARNED
            lengths[first : first + count] -= np.argmax(learned[:, ::-1], axis=1)
    return lengths


class GroupedSampler:
    """The order of another sampler, with blocks of similar length in one micro-batch.

    The blocks of a window of steps are those of the other sampler. They are sorted by length, and dealt to
    the steps of the window at random. The blocks of a step depend only on its number.
    """

    def __init__(self, order: BlockSampler, lengths: np.ndarray, seed: int) -> None:
        self.lengths = lengths
        self._order, self._seed = order, seed
        self._cached: tuple[tuple[int, int], np.ndarray] = ((-1, 0), np.empty(0))

    def step(self, number: int, samples: int) -> np.ndarray:
        """Return the blocks of step `number`, counted from 0, the longest first."""
        first, size = window(number, samples, len(self.lengths))
        if self._cached[0] != (first, samples):
            chosen = np.concatenate([self._order.step(first + at, samples) for at in range(size)])
            ordered = chosen[np.argsort(-self.lengths[chosen], kind="stable")].reshape(size, samples)
            key = epoch_key(self._seed, mix_bits(first))
            dealt = [permute(at, size, key) for at in range(size)]
            self._cached = ((first, samples), ordered[dealt])
        return self._cached[1][number - first]

    def padded_length(self, chosen: np.ndarray, most: int) -> int:
        return min(most, -(-int(self.lengths[chosen].max()) // MULTIPLE) * MULTIPLE)


def padding_shares(
    sampler: GroupedSampler, steps: int, samples: int, micro: int, most: int
) -> tuple[float, float]:
    """Return the share of padding in the first steps: grouped, and in whole blocks."""
    used = cut = 0
    for number in range(steps):
        chosen = sampler.step(number, samples)
        used += int(sampler.lengths[chosen].sum())
        cut += micro * sum(sampler.padded_length(part, most) for part in chosen.reshape(-1, micro))
    return 1 - used / cut, 1 - used / (steps * samples * most)


def window(number: int, samples: int, count: int) -> tuple[int, int]:
    """Return the first step and the size of a step's window.

    No window reaches over the end of an epoch of `count` blocks: a step that does is a window by itself.
    """
    epoch = number * samples // count
    first, end = -(-epoch * count // samples), (epoch + 1) * count // samples
    if not first <= number < end:
        return number, 1
    start = first + (number - first) // WINDOW * WINDOW
    return start, min(WINDOW, end - start)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """This data rank's part of a step."""

    rank: int
    ranks: int
    micro: int
    numbers: tuple[int, ...]
    """This rank's micro-batches, numbered over all ranks of a step."""
    device: torch.device

    @property
    def accumulation(self) -> int:
        return len(self.numbers)

    @property
    def samples(self) -> int:
        """Blocks of a step on all ranks."""
        return self.ranks * self.micro * self.accumulation


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward. Shape [micro, length], int64."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """Not shifted; -100 where nothing is learned."""
    weight: float
    """Factor of the mean loss over the labels."""
    blocks: np.ndarray
    positions: torch.Tensor | None = None
    """Position of each token in its document, where documents of a block do not see each other."""

    def inputs(self) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": self.tokens, "labels": self.labels}
        return inputs if self.positions is None else {**inputs, "position_ids": self.positions}


class Feed:
    def __init__(
        self, blocks: Blocks | Mixture, seed: int, layout: BatchLayout, grouped: bool = False
    ) -> None:
        self.blocks = blocks
        self.layout = layout
        order = sampler_of(blocks, seed)
        self.groups = GroupedSampler(order, lengths_of(blocks), seed) if grouped else None
        self._sampler = self.groups or order

    def step(self, number: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of a step, counted from 0."""
        batches = self._micro_batches(number)
        mean = self.blocks.labels(batches.reshape(-1)).sum() / len(batches)
        for own in batches[list(self.layout.numbers)]:
            yield micro_batch(self.blocks, own, mean, self.layout.device, self._length(own))

    def tokens(self, number: int) -> list[int]:
        """Return the tokens of each micro-batch of a step on all ranks, with padding."""
        return [len(blocks) * self._length(blocks) for blocks in self._micro_batches(number)]

    def _micro_batches(self, number: int) -> np.ndarray:
        """Return the blocks of a step on all ranks. Shape [micro-batches, micro]."""
        return self._sampler.step(number, self.layout.samples).reshape(-1, self.layout.micro)

    def _length(self, chosen: np.ndarray) -> int:
        most = self.blocks.length
        return most if self.groups is None else self.groups.padded_length(chosen, most)


def micro_batch(
    blocks: Blocks | Mixture, chosen: np.ndarray, mean: float, device: torch.device, length: int | None = None
) -> MicroBatch:
    """Read blocks as tensors, cut to `length`; `mean` is the average number of labels of a micro-batch of
    the step."""
    read = blocks.read(chosen)

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[:, :length])).to(device, non_blocking=True)

    tokens = on_device(read.tokens)
    labels = tokens if read.labels is read.tokens else on_device(read.labels)
    positions = None if read.positions is None else on_device(read.positions)
    return MicroBatch(tokens, labels, float(blocks.labels(chosen).sum() / mean), chosen, positions)


def validation_batches(
    blocks: Blocks | Mixture, layout: BatchLayout, most: int | None
) -> Iterator[tuple[MicroBatch, int]]:
    """Deal the first `most` validation blocks to ranks in turns, the same every time.

    Yields each micro-batch with its number of labels. Every rank gets equally many micro-batches: the last
    may have no labels.
    """
    stride = layout.ranks * layout.micro
    count = len(blocks) if most is None else min(most, len(blocks))
    for turn in range(-(-count // stride)):
        first = turn * stride + layout.rank * layout.micro
        chosen = np.arange(first, first + layout.micro, dtype=np.int64)
        real = chosen < count
        # Block 0 fills a micro-batch up to its shape, without labels.
        chosen[~real] = 0
        batch = micro_batch(blocks, chosen, 1.0, layout.device)
        if not real.all():
            labels = batch.labels.clone()  # may be the tokens themselves
            labels[torch.from_numpy(~real).to(layout.device)] = IGNORED
            batch = replace(batch, labels=labels, blocks=chosen[real])
        yield batch, int(blocks.labels(chosen[real]).sum())
