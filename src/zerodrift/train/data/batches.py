"""Blocks to micro-batches on a device, and how much each counts.

The gradient of a step is the mean over all its labels, wherever they are: a micro-batch with few labels
counts for little. What a step has in labels follows from the blocks' counts, so every rank knows it without
asking. Where all blocks have equally many, each micro-batch counts 1 and nothing is multiplied.

Invariant: the blocks of a step depend on its number alone, and so do the weights up to the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from zerodrift.train.data.blocks import IGNORED, Blocks
from zerodrift.train.data.grouping import GroupedSampler, lengths_of
from zerodrift.train.data.mixture import Mixture, sampler_of
from zerodrift.train.data.sampling import blocks_of


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """This rank's place among those that see different data, and how a step is cut."""

    rank: int
    ranks: int
    micro: int
    """Blocks of a micro-batch."""
    numbers: tuple[int, ...]
    """Of this rank's micro-batches, among those of a step over all ranks."""
    device: torch.device

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step, of one rank."""
        return len(self.numbers)

    @property
    def samples(self) -> int:
        """Blocks of a step, over all ranks."""
        return self.ranks * self.micro * self.accumulation


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward gets."""

    tokens: torch.Tensor
    """`[micro, length]`, int64."""
    labels: torch.Tensor
    """The same, not shifted; -100 where nothing is learned."""
    weight: float
    """What the mean loss over its labels is multiplied by."""
    blocks: np.ndarray
    """Which blocks they are."""
    positions: torch.Tensor | None = None
    """`[micro, length]`, of each token in its document, where documents do not see each other."""


class Feed:
    """The training data as one rank sees it."""

    def __init__(self, blocks: Blocks | Mixture, seed: int, seat: BatchLayout, grouped: bool = False) -> None:
        """`grouped`: blocks of like length share a micro-batch, which is cut to the longest."""
        self.blocks = blocks
        self.seat = seat
        order = sampler_of(blocks, seed)
        self.groups = GroupedSampler(order, lengths_of(blocks), seed) if grouped else None
        self._sampler = self.groups or order

    def step(self, number: int) -> Iterator[MicroBatch]:
        """The micro-batches of an optimizer step, counted from 0."""
        seat = self.seat
        chosen = self._sampler.step(number, seat.samples)
        mean = self.blocks.labels(chosen).sum() / (seat.ranks * seat.accumulation)
        for place in seat.numbers:
            own = blocks_of(chosen, place, seat.micro)
            batch = micro_batch(self.blocks, own, mean, seat.device)
            yield batch if self.groups is None else cut(batch, self._length(own))

    def tokens(self, number: int) -> list[int]:
        """Of each micro-batch of a step over all ranks, with padding."""
        seat, chosen = self.seat, self._sampler.step(number, self.seat.samples)
        places = range(seat.ranks * seat.accumulation)
        return [seat.micro * self._length(blocks_of(chosen, place, seat.micro)) for place in places]

    def _length(self, chosen: np.ndarray) -> int:
        most = self.blocks.length
        return most if self.groups is None else self.groups.padded(chosen, most)

    def labels(self, number: int) -> int:
        """Labels of a step, over all ranks."""
        return int(self.blocks.labels(self._sampler.step(number, self.seat.samples)).sum())

    def epoch(self, steps: int) -> float:
        """Passes over the data after so many steps."""
        return steps * self.seat.samples / len(self.blocks)


def micro_batch(
    blocks: Blocks | Mixture, chosen: np.ndarray, mean: float, device: torch.device
) -> MicroBatch:
    """Blocks as tensors. `mean` is how many labels a micro-batch of the step has on average."""
    read = blocks.read(chosen)
    on_device = torch.from_numpy(read.tokens).to(device, non_blocking=True)
    same = read.labels is read.tokens
    places = read.positions
    return MicroBatch(
        tokens=on_device,
        labels=on_device if same else torch.from_numpy(read.labels).to(device, non_blocking=True),
        weight=float(blocks.labels(chosen).sum() / mean),
        blocks=chosen,
        positions=None if places is None else torch.from_numpy(places).to(device, non_blocking=True),
    )


def cut(batch: MicroBatch, length: int) -> MicroBatch:
    """Without the tokens from `length` on."""
    tokens, places = batch.tokens[:, :length].contiguous(), batch.positions
    return replace(
        batch,
        tokens=tokens,
        labels=tokens if batch.labels is batch.tokens else batch.labels[:, :length].contiguous(),
        positions=None if places is None else places[:, :length].contiguous(),
    )


@dataclass(frozen=True, slots=True)
class ValidationBatch:
    """One micro-batch of the validation data, for one rank."""

    batch: MicroBatch
    labels: int
    """That count: 0 for one that is there only so that all ranks do the same number of forwards."""


def validation_batches(
    blocks: Blocks | Mixture, seat: BatchLayout, most: int | None
) -> Iterator[ValidationBatch]:
    """The validation blocks from the first on, at most `most` of them and the same every time, in turns among
    ranks."""
    stride = seat.ranks * seat.micro
    count = len(blocks) if most is None else min(most, len(blocks))
    for turn in range(-(-count // stride)):
        first = turn * stride + seat.rank * seat.micro
        chosen = np.arange(first, first + seat.micro, dtype=np.int64)
        real = chosen < count
        # Every micro-batch has the same shape; of blocks that are only there for that, nothing is counted.
        chosen[~real] = 0
        batch = micro_batch(blocks, chosen, 1.0, seat.device)
        if not real.all():
            labels = batch.labels.clone()  # may be the tokens themselves
            labels[torch.from_numpy(~real).to(seat.device)] = IGNORED
            batch = replace(batch, labels=labels, blocks=chosen[real])
        yield ValidationBatch(batch, int(blocks.labels(chosen[real]).sum()))
