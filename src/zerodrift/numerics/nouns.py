"""The words of an audit: what was estimated, what was replayed, what is recommended.

Invariant: these are values. A number that was replayed is a `Replayed`; an `Estimate` is never shown as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from zerodrift.numerics.signals import Drift
from zerodrift.numerics.variants import Choice
from zerodrift.policy.nouns import Output

FindingKind = Literal[
    "narrow code", "narrow buffer", "overflow", "underflow", "rounded", "routing",
    "accumulate", "reduce", "gradient", "lost updates", "stuck state", "no gradient", "untied",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one cell is worth, to first order."""

    choice: Choice
    square: float
    """Of the drift that it causes alone, a mean over targets."""
    loss: float | None = None
    """By how much it moves the mean loss; None where that was not asked for."""

    @property
    def rms(self) -> float:
        return math.sqrt(self.square)


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the model's code that rounds, with no parameter to charge it to; an estimate."""

    module: str
    operation: str
    line: str
    dtype: str
    rms: float
    relative: float
    """Size of the errors beside what should come out."""
    size: float
    """Root of the mean square of what should come out."""
    loss: float | None = None
    """By how much it moves the mean loss; None where that was not asked for."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one cell did, twice: the reference with it as planned, and the plan with it in fp32."""

    choice: Choice
    alone: Drift
    """From the reference, with nothing else narrow."""
    widened: Drift
    """From the reference, with everything else as planned."""


@dataclass(frozen=True, slots=True)
class GradientLine:
    """The gradient of one parameter beside that of the reference."""

    name: str
    cosine: float
    relative: float
    """Norm of the difference over the norm of the reference's."""
    norm: float
    """Of the reference's."""
    size: float
    """Of its own."""
    accumulate: float = 0.0
    """What the `accumulate` column alone does of it; replayed."""
    reduce: float = 0.0
    """What the `reduce` column alone does of it; replayed, or, on one rank, an estimate that takes every
    micro-batch for another rank's."""


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """What rounding did to the updates of one parameter."""

    name: str
    lost: float
    """Share of the elements that were to change and are remembered nowhere."""
    underflow: float
    """Share of elements whose moment is stored as zero."""
    stuck: float
    """Share of elements whose last moment does not shrink when no gradient comes."""
    state: str


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One thing that is not as it should be."""

    kind: FindingKind
    where: str
    """A parameter, a column of it, or a module and a line."""
    what: str
    """What was measured, as a clause."""
    do: str
    weight: float
    """By which findings are put in order: its drift beside all, or the like."""
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of a plan, on one rank."""

    rest: int
    peak: int
    wire: int
    compute: int
    """What a forward reads of the weights, in the dtypes that it computes in."""


@dataclass(frozen=True, slots=True)
class Point:
    """A plan with some pins, measured."""

    mode: str
    pins: tuple[tuple[str, tuple[str, ...], Output | None], ...]
    """Pattern, parameters, and what their modules return; in the order in which they were taken."""
    drift: Drift
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Pins for at most so many bytes, and what each was worth."""

    budget: float
    """Share of more bytes."""
    of: str
    """Of which: `rest`, `peak` or `wire`."""
    points: tuple[Point, ...]
    """From the plan as it is, in its mode and under autocast, to everything pinned."""
    widest: Point
    """Everything pinned."""
    taken: int
    """Which of the points is recommended."""
    rules: tuple[Mapping[str, str], ...] = ()
    """What to paste under `precision.rules`."""

    @property
    def removed(self) -> float:
        """Of the squared drift that pinning everything removes."""
        first, last = self.points[0].drift.square, self.widest.drift.square
        if first <= last:
            return 1.0
        return (first - self.points[self.taken].drift.square) / (first - last)


@dataclass(frozen=True, slots=True)
class Narrower:
    """What a narrower column would do to the gradients, or to the updates, of real steps."""

    column: str
    value: str
    middle: float
    """Of the norm: the median over parameters."""
    worst: str
    """The parameter that it changes most."""
    most: float
    many: int
    """Parameters that it changes by more than a twentieth."""
    before: Bytes
    after: Bytes
