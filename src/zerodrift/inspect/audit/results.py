"""Records of an audit: estimates, replays, findings, and recommendations.

Invariant: an `Estimate` or a `Place` is estimated, and all other records hold measurements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zerodrift.inspect.audit.runs import Drift
from zerodrift.inspect.audit.variants import Choice
from zerodrift.policy import Output

FindingKind = Literal[
    "narrow code", "narrow buffer", "overflow", "underflow", "rounded", "routing",
    "accumulate", "reduce", "gradient", "lost updates", "stuck state", "no gradient", "untied",
]  # fmt: skip

ByteKind = Literal["rest", "peak", "wire"]  # bytes of a plan that a budget is of


@dataclass(frozen=True, slots=True)
class Estimate:
    """First-order worth of one cell."""

    choice: Choice
    square: float  # mean over targets of the squared drift that the cell alone causes
    loss: float = 0.0  # change of the mean loss

    @property
    def rms(self) -> float:
        return math.sqrt(self.square)


@dataclass(frozen=True, slots=True)
class Place:
    """First-order worth of one place in the model's code that rounds and involves no parameter."""

    module: str
    operation: str
    line: str
    dtype: str
    rms: float
    relative: float  # norm of the errors over the norm of the exact results
    size: float  # root mean square of the exact results
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class CellReplay:
    """Two runs for one cell. Their drift is from the reference."""

    choice: Choice
    alone: Drift  # the reference with the cell as planned
    widened: Drift | None  # the plan with the cell in fp32; None if the model cannot run so
    output: Output | None = None  # what its modules return there; None for the default


@dataclass(frozen=True, slots=True)
class GradientLine:
    """Gradient of one parameter beside the reference's."""

    name: str
    cosine: float
    relative: float  # norm of the difference over `norm`
    norm: float  # norm of the reference's gradient
    size: float  # norm of the plan's gradient
    accumulate: float = 0.0  # relative change by the `accumulate` column alone, replayed
    reduce: float = 0.0
    """Relative change by the `reduce` column alone, replayed. On one rank it is an estimate, as if each
    micro-batch were on a rank of its own."""


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """Effect of rounding on the updates of one parameter, as shares of its elements."""

    name: str
    lost: float  # elements whose change no master remembers
    underflow: float  # elements whose moment is stored as zero
    stuck: float  # elements whose moment does not decay without a gradient
    state: str


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A defect that the mode does not explain."""

    kind: FindingKind
    where: str  # a parameter, a column of it, or a module and a line
    what: str
    do: str
    weight: float  # rank among findings, the largest first
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of a plan on one rank."""

    rest: int
    peak: int
    wire: int
    compute: int  # weights of a forward, in their compute dtypes

    @property
    def sum(self) -> int:
        """Bytes at rest and on the wire of a step."""
        return self.rest + self.wire


@dataclass(frozen=True, slots=True)
class Point:
    """A plan with some pins, measured."""

    mode: str
    pins: tuple[tuple[str, tuple[str, ...], Output | None], ...]
    """(pattern, parameters, output of their modules) in the order of the search."""
    drift: Drift
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Pins within a budget of bytes."""

    budget: float  # share of more bytes
    of: str  # kind of bytes: `rest`, `peak` or `wire`
    points: tuple[Point, ...]  # from the plan as it is, in its mode and under autocast, to everything pinned
    widest: Point  # everything pinned
    taken: int  # index of the recommended point
    rules: tuple[Mapping[str, str], ...] = ()  # rules to paste under `precision.rules`

    @property
    def chosen(self) -> Point:
        return self.points[self.taken]

    @property
    def removed(self) -> float:
        """Share of the squared drift that pinning everything removes and these pins remove too."""
        first, last = self.points[0].drift.square, self.widest.drift.square
        return (first - self.chosen.drift.square) / (first - last) if first > last else 1.0

    def config(self, width: int = 80) -> str:
        """Return the recommendation as YAML for the config."""
        return rules_text(self.rules, f"  mode: {self.chosen.mode}", width=width)


def rules_text(rules: Sequence[Mapping[str, str]], *lines: str, width: int = 80) -> str:
    """Return rules as YAML for the config, below other lines of `precision`. A wide rule takes several
    lines."""
    found = ["precision:", *lines, *(["  rules:"] if rules else [])]
    for rule in rules:
        quoted = {**rule, "match": json.dumps(rule["match"], ensure_ascii=False)}
        cells = [f"{key}: {value}" for key, value in quoted.items()]
        line = f"    - {{{', '.join(cells)}}}"
        is_wide = len(line) > width
        found += [f"    - {cells[0]}", *(f"      {cell}" for cell in cells[1:])] if is_wide else [line]
    return "\n".join(found)


@dataclass(frozen=True, slots=True)
class NarrowerColumn:
    """Effect of a narrower column on gradients or updates, as shares of their norms."""

    column: str
    value: str
    middle: float  # median over parameters
    worst: str  # parameter that changes most
    most: float
    many: int  # parameters that change by more than a twentieth
    before: Bytes
    after: Bytes


FormatColumn = Literal["gather", "storage", "compute"]  # columns in which narrow formats are tried


@dataclass(frozen=True, slots=True)
class FormatGoal:
    """Purpose of narrow formats, and the limit on the drift from fp32."""

    of: Literal["bytes", "speed"]
    limit: float
    is_multiple: bool  # True if the limit is a multiple of the plan's own drift, False if it is an rms


@dataclass(frozen=True, slots=True)
class FormatPoint:
    """A plan with narrow formats, measured."""

    drift: Drift
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class FormatTrial:
    """One narrow format for one group of parameters."""

    pattern: str
    names: tuple[str, ...]
    column: FormatColumn
    format: str
    numel: int
    rules: tuple[Mapping[str, str], ...]
    alone: FormatPoint | None = None  # with everything else as planned, or None if it was not run
    together: FormatPoint | None = None
    """Drift and bytes with the formats chosen before it, or None if it was not run so."""
    left_out: str = ""  # reason why it was not run, or `""`


@dataclass(frozen=True, slots=True)
class FormatAdvice:
    """Narrow formats within a limit on the drift from fp32."""

    goal: FormatGoal
    limit: float  # largest rms
    start: FormatPoint  # the plan as it is
    trials: tuple[FormatTrial, ...]
    taken: tuple[int, ...]  # indices of the chosen trials in the order in which they were added
    chosen: FormatPoint  # the chosen trials together
    everything: FormatPoint | None
    """Every group in the format that saves most, or None if these are the chosen ones."""
    rules: tuple[Mapping[str, str], ...]  # rules to paste under `precision.rules`
