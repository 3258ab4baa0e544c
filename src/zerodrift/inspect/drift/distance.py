"""Compare two sides token by token: micro-batches of tokens, and how far log-probabilities are apart.

Sequences of one length make a micro-batch. Tokens that a server did not record are left out everywhere.

Invariant: every vector has the same tokens in the same order. Equal bits are exactly 0 apart, and a token
without a finite log-probability is counted, never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerodrift.errors import ModelError, NonFiniteError
from zerodrift.inspect.audit.signals import LogprobDifference, Signals, measure_gaps
from zerodrift.inspect.audit.tokens import Batch, Ids, Recorded

CLIPPED = 0.2
"""Distance of a probability ratio from 1 that PPO clips."""

TOKENS = 4096
"""Tokens of one forward."""


@dataclass(frozen=True, slots=True)
class TokenDrift(LogprobDifference):
    """Log-probabilities of the sampler minus the trainer's, over tokens."""

    tokens: int
    not_finite: int
    """Tokens without a finite log-probability of the sampler; no other number counts them."""
    mean_abs: float
    median: float
    """Median of absolute differences."""
    p99: float
    clipped: float
    """Share of tokens whose probability ratio is not within 0.2 of 1."""


def token_drift(other: Tensor, trainer: Tensor) -> TokenDrift:
    """Measure log-probabilities. Shape [tokens], fp64."""
    gaps = (other - trainer)[other.isfinite()]
    far, count = gaps.abs().sort().values, len(gaps)
    if not count:
        gaps = far = torch.full((1,), math.nan)
    return TokenDrift(
        **measure_gaps(gaps),
        tokens=len(other),
        not_finite=len(other) - count,
        mean_abs=float(far.mean()),
        median=float(far[max(0, count - 1) // 2]),
        p99=float(far[max(0, math.ceil(0.99 * count) - 1)]),
        clipped=float((gaps.expm1().abs() > CLIPPED).double().mean()) if count else math.nan,
    )


def share(part: TokenDrift, whole: TokenDrift) -> float:
    """Share of the whole: of tokens that are not finite if there are any, else of the squared drift."""
    if whole.not_finite:
        return part.not_finite / whole.not_finite
    if part.not_finite:
        return math.inf
    return part.square / whole.square if whole.square else 0.0


@dataclass(frozen=True, slots=True)
class FarToken:
    """One of the tokens that are furthest apart."""

    sequence: int
    place: int
    token: int
    trainer: float
    other: float


def make_batches(sequences: Ids) -> tuple[list[Batch], list[list[int]]]:
    """Make micro-batches of sequences of one length; return the numbers of their sequences too."""
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
    """The tokens that are compared, in the order of the micro-batches."""

    order: list[list[int]]
    sequences: Ids
    of_server: Recorded | None

    def select(self, seen: Signals) -> Tensor:
        """The log-probabilities of a run."""
        return self.kept(torch.cat(seen.targets))

    def kept(self, per_token: Tensor) -> Tensor:
        """Select from a value for each token except the first of a sequence."""
        flat = self._flat()
        return per_token if flat is None else per_token[~flat.isnan()]

    def recorded(self) -> Tensor | None:
        flat = self._flat()
        return None if flat is None else flat[~flat.isnan()]

    def _flat(self) -> Tensor | None:
        """Recorded values of all tokens, NaN where there is none."""
        if self.of_server is None:
            return None
        rows = (self.of_server[number] for part in self.order for number in part)
        values = [float("nan") if item is None else item for row in rows for item in row]
        return torch.tensor(values, dtype=torch.float64)

    def furthest(self, mine: Tensor, theirs: Tensor, count: int = 5) -> tuple[FarToken, ...]:
        numbers = [number for part in self.order for number in part]
        every = [(number, place) for number in numbers for place in range(1, len(self.sequences[number]))]
        flat = self._flat()
        kept = [True] * len(every) if flat is None else (~flat.isnan()).tolist()
        places = [each for each, keep in zip(every, kept, strict=True) if keep]
        far = (theirs - mine).abs().nan_to_num(nan=float("inf"))
        found = []
        for index in far.argsort(descending=True)[:count].tolist():
            if far[index] > 0:
                number, place = places[index]
                token = self.sequences[number][place]
                found.append(FarToken(number, place, token, float(mine[index]), float(theirs[index])))
        return tuple(found)


def require_tokens(own: Signals, sequences: Ids, order: Sequence[Sequence[int]]) -> None:
    """Require a finite log-probability for every token except the first of a sequence."""
    for part, targets in zip(order, own.targets, strict=True):
        wanted = sum(len(sequences[number]) - 1 for number in part)
        if len(targets) != wanted:
            must = "must take its loss from `cross_entropy` over the next tokens of `labels`"
            got = f"{len(targets):,} targets for {wanted:,} tokens that have one before them"
            do = "Shift labels inside of the model, as models of `transformers` do."
            raise ModelError("model", must, got=got, do=do)
        bad = (~targets.isfinite()).nonzero().flatten().tolist()
        if bad:
            sequence = part[bad[0] // (len(sequences[part[0]]) - 1)]
            must = "must have finite log-probabilities on the trainer's side"
            do = "Look at the trainer's mode: its values are beyond the range of what it computes in."
            raise NonFiniteError(f"tokens[{sequence}]", must, got=f"{len(bad):,} inf or nan", do=do)
