"""The tokens that two sides are compared on: as micro-batches, and as one vector of log-probabilities.

Sequences of one length make a micro-batch. Where a server's log-probabilities were recorded, what it left out
is left out everywhere.

Invariant: every vector has the same tokens in the same order, and each knows its sequence and its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerodrift.errors import ModelError, NonFiniteError
from zerodrift.numerics.runs import Batch
from zerodrift.numerics.signals import Signals
from zerodrift.numerics.token_files import Ids, Recorded

TOKENS = 4096
"""Tokens of one forward."""


@dataclass(frozen=True, slots=True)
class FarToken:
    """One of the tokens that are furthest apart."""

    sequence: int
    place: int
    token: int
    trainer: float
    other: float


def batched(sequences: Ids) -> tuple[list[Batch], list[list[int]]]:
    """Micro-batches of sequences of one length, and which sequences each has."""
    groups: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        groups.setdefault(len(sequence), []).append(number)
    batches: list[Batch] = []
    order = []
    for length, numbers in groups.items():
        at_once = max(1, TOKENS // length)
        for start in range(0, len(numbers), at_once):
            part = numbers[start : start + at_once]
            ids = torch.tensor([sequences[number] for number in part])
            batches.append({"input_ids": ids, "labels": ids})
            order.append(part)
    return batches, order


@dataclass(frozen=True, slots=True)
class ComparedTokens:
    """Log-probabilities of the tokens that are compared, in the order of the batches."""

    order: list[list[int]]
    sequences: Ids
    of_server: Recorded | None

    def __call__(self, seen: Signals) -> Tensor:
        return self.kept(torch.cat(seen.targets))

    def kept(self, per_token: Tensor) -> Tensor:
        """Of a value for each token but the first of a sequence, those that are compared."""
        return per_token if self.of_server is None else per_token[~self._flat().isnan()]

    def recorded(self) -> Tensor:
        flat = self._flat()
        return flat[~flat.isnan()]

    def _flat(self) -> Tensor:
        if self.of_server is None:
            raise AssertionError("nothing was recorded")
        rows = (self.of_server[number] for part in self.order for number in part)
        return torch.tensor(
            [float("nan") if item is None else item for row in rows for item in row], dtype=torch.float64
        )

    def places(self) -> list[tuple[int, int]]:
        """(sequence, place) of each."""
        every = [
            (number, place)
            for part in self.order
            for number in part
            for place in range(1, len(self.sequences[number]))
        ]
        if self.of_server is None:
            return every
        return [each for each, kept in zip(every, (~self._flat().isnan()).tolist(), strict=True) if kept]

    def furthest(self, mine: Tensor, theirs: Tensor, count: int = 5) -> tuple[FarToken, ...]:
        places = self.places()
        far = (theirs - mine).abs().nan_to_num(nan=float("inf"))
        found = []
        for index in far.argsort(descending=True)[:count].tolist():
            if far[index] > 0:
                number, place = places[index]
                token = self.sequences[number][place]
                found.append(FarToken(number, place, token, float(mine[index]), float(theirs[index])))
        return tuple(found)


def require_tokens(own: Signals, sequences: Ids, order: Sequence[Sequence[int]]) -> None:
    """A log-probability for every token but the first, and each a number."""
    for part, targets in zip(order, own.targets, strict=True):
        wanted = sum(len(sequences[number]) - 1 for number in part)
        if len(targets) != wanted:
            raise ModelError(
                "model",
                "must take its loss from `cross_entropy` over the next tokens of `labels`",
                got=f"{len(targets):,} targets for {wanted:,} tokens that have one before them",
                do="Shift labels inside of the model, as models of `transformers` do.",
            )
        bad = (~targets.isfinite()).nonzero().flatten().tolist()
        if bad:
            sequence = part[bad[0] // (len(sequences[part[0]]) - 1)]
            raise NonFiniteError(
                f"tokens[{sequence}]",
                "must have finite log-probabilities on the trainer's side",
                got=f"{len(bad):,} inf or nan",
                do="Look at the trainer's mode: its values are beyond the range of what it computes in.",
            )
