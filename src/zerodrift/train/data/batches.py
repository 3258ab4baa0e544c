"""Make micro-batches of blocks on a device, each with its weight in the loss.

The gradient of a step is the mean over all its labels on all ranks, so a micro-batch with few labels has a
small weight. The labels of a step follow from the blocks' counts, so every rank knows them without asking.
Where all blocks have equally many, each weight is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from zerodrift.train.data.blocks import IGNORED, Blocks
from zerodrift.train.data.sampling import GroupedSampler, Mixture, blocks_of, lengths_of, sampler_of


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """This data rank's part of a step."""

    rank: int
    ranks: int
    micro: int
    """Blocks of a micro-batch."""
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
    """Numbers of the blocks."""
    positions: torch.Tensor | None = None
    """Position of each token in its document, where documents of a block do not see each other."""

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of the model."""
        inputs = {"input_ids": self.tokens, "labels": self.labels}
        return inputs if self.positions is None else {**inputs, "position_ids": self.positions}


class Feed:
    """The training data of one rank."""

    def __init__(self, blocks: Blocks | Mixture, seed: int, seat: BatchLayout, grouped: bool = False) -> None:
        """`grouped`: blocks of like length share a micro-batch, which is cut to the longest."""
        self.blocks = blocks
        self.seat = seat
        order = sampler_of(blocks, seed)
        self.groups = GroupedSampler(order, lengths_of(blocks), seed) if grouped else None
        self._sampler = self.groups or order

    def step(self, number: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of a step, counted from 0."""
        seat = self.seat
        chosen = self._sampler.step(number, seat.samples)
        mean = self.blocks.labels(chosen).sum() / (seat.ranks * seat.accumulation)
        for place in seat.numbers:
            own = blocks_of(chosen, place, seat.micro)
            yield micro_batch(self.blocks, own, mean, seat.device, self._length(own))

    def tokens(self, number: int) -> list[int]:
        """Return the tokens of each micro-batch of a step on all ranks, with padding."""
        seat, chosen = self.seat, self._sampler.step(number, self.seat.samples)
        places = range(seat.ranks * seat.accumulation)
        return [seat.micro * self._length(blocks_of(chosen, place, seat.micro)) for place in places]

    def _length(self, chosen: np.ndarray) -> int:
        most = self.blocks.length
        return most if self.groups is None else self.groups.padded_length(chosen, most)

    def epoch(self, steps: int) -> float:
        """Return the passes over the data in a number of steps."""
        return steps * self.seat.samples / len(self.blocks)


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
    blocks: Blocks | Mixture, seat: BatchLayout, most: int | None
) -> Iterator[tuple[MicroBatch, int]]:
    """Deal the first `most` validation blocks to ranks in turns, the same every time.

    Yields a micro-batch and its labels; none for a batch that only gives all ranks as many forwards.
    """
    stride = seat.ranks * seat.micro
    count = len(blocks) if most is None else min(most, len(blocks))
    for turn in range(-(-count // stride)):
        first = turn * stride + seat.rank * seat.micro
        chosen = np.arange(first, first + seat.micro, dtype=np.int64)
        real = chosen < count
        # Every micro-batch has the same shape. Blocks that only fill it up do not count.
        chosen[~real] = 0
        batch = micro_batch(blocks, chosen, 1.0, seat.device)
        if not real.all():
            labels = batch.labels.clone()  # may be the tokens themselves
            labels[torch.from_numpy(~real).to(seat.device)] = IGNORED
            batch = replace(batch, labels=labels, blocks=chosen[real])
        yield batch, int(blocks.labels(chosen[real]).sum())
