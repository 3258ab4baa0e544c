"""How far two sides are from each other, token by token.

Invariant: pure; sides with the same bits are exactly 0 apart, and a token that has no finite log-probability
is counted, never averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

CLIPPED = 0.2
"""A token whose probability is further from 1 times the other's than this is one that PPO would clip."""


@dataclass(frozen=True, slots=True)
class TokensApart:
    """Differences of log-probabilities, the other side's minus the trainer's, over tokens."""

    tokens: int
    not_finite: int
    """Tokens without a finite log-probability on the other side; they are in none of the numbers below."""
    mean: float
    mean_abs: float
    rms: float
    k3: float
    """Mean of `exp(d) - 1 - d`: an estimate of the divergence that is never negative."""
    median: float
    """Of absolute differences, as the two below."""
    p99: float
    largest: float
    clipped: float
    """Share of tokens whose probability ratio is not within 0.2 of 1."""

    @property
    def square(self) -> float:
        return self.rms**2


def apart(other: Tensor, trainer: Tensor) -> TokensApart:
    """Of log-probabilities in fp64, `[tokens]`."""
    finite = other.isfinite()
    gaps = (other - trainer)[finite]
    far = gaps.abs().sort().values
    count = len(gaps)
    if not count:
        return TokensApart(len(other), len(other), *[math.nan] * 8)
    return TokensApart(
        tokens=len(other),
        not_finite=len(other) - count,
        mean=float(gaps.mean()),
        mean_abs=float(far.mean()),
        rms=float(gaps.square().mean().sqrt()),
        k3=float((gaps.expm1() - gaps).mean()),
        median=float(far[(count - 1) // 2]),
        p99=float(far[math.ceil(0.99 * count) - 1]),
        largest=float(far[-1]),
        clipped=float((gaps.expm1().abs() > CLIPPED).double().mean()),
    )


def share(part: TokensApart, whole: TokensApart) -> float:
    """What a part is of the whole: of tokens without a number where there are any, else of the square."""
    if whole.not_finite:
        return part.not_finite / whole.not_finite
    if part.not_finite:
        return math.inf
    return part.square / whole.square if whole.square else 0.0
