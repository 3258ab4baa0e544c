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

from zerodrift.train.blocks import IGNORED, Blocks
from zerodrift.train.sampler import BlockSampler, blocks_of


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


class Feed:
    """The training data as one rank sees it."""

    def __init__(self, blocks: Blocks, seed: int, seat: BatchLayout) -> None:
        self.blocks = blocks
        self.seat = seat
        self._sampler = BlockSampler(len(blocks), seed)

    def step(self, number: int) -> Iterator[MicroBatch]:
        """The micro-batches of an optimizer step, counted from 0."""
        seat = self.seat
        chosen = self._sampler.step(number, seat.samples)
        mean = self.blocks.labels(chosen).sum() / (seat.ranks * seat.accumulation)
        for place in seat.numbers:
            yield micro_batch(self.blocks, blocks_of(chosen, place, seat.micro), mean, seat.device)

    def labels(self, number: int) -> int:
        """Labels of a step, over all ranks."""
        return int(self.blocks.labels(self._sampler.step(number, self.seat.samples)).sum())

    def epoch(self, steps: int) -> float:
        """Passes over the data after so many steps."""
        return steps * self.seat.samples / len(self.blocks)


def micro_batch(blocks: Blocks, chosen: np.ndarray, mean: float, device: torch.device) -> MicroBatch:
    """Blocks as tensors. `mean` is how many labels a micro-batch of the step has on average."""
    tokens, labels = blocks.read(chosen)
    on_device = torch.from_numpy(tokens).to(device, non_blocking=True)
    same = labels is tokens
    return MicroBatch(
        tokens=on_device,
        labels=on_device if same else torch.from_numpy(labels).to(device, non_blocking=True),
        weight=float(blocks.labels(chosen).sum() / mean),
        blocks=chosen,
    )


@dataclass(frozen=True, slots=True)
class ValidationBatch:
    """One micro-batch of the validation data, for one rank."""

    batch: MicroBatch
    labels: int
    """That count: 0 for one that is there only so that all ranks do the same number of forwards."""


def validation_batches(blocks: Blocks, seat: BatchLayout, most: int) -> Iterator[ValidationBatch]:
    """The validation blocks from the first on, the same every time: in turns among ranks, and at most as many
    as `most` steps have."""
    stride = seat.ranks * seat.micro
    rounds = min(most * seat.accumulation, -(-len(blocks) // stride))
    for turn in range(rounds):
        first = turn * stride + seat.rank * seat.micro
        chosen = np.arange(first, first + seat.micro, dtype=np.int64)
        real = chosen < len(blocks)
        # Every micro-batch has the same shape; of blocks that are only there for that, nothing is counted.
        chosen[~real] = 0
        batch = micro_batch(blocks, chosen, 1.0, seat.device)
        if not real.all():
            labels = batch.labels.clone()  # may be the tokens themselves
            labels[torch.from_numpy(~real).to(seat.device)] = IGNORED
            batch = replace(batch, labels=labels, blocks=chosen[real])
        yield ValidationBatch(batch, int(blocks.labels(chosen[real]).sum()))
