"""Explanation of one parameter: all that the plan says about it.

`terminal` shows it as text, `as_json` as JSON, and `engine.explain` returns it.

Invariant: the slices of a parameter cover it exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerodrift.plan.boundaries import enclosing_modules
from zerodrift.plan.table import Boundary, Plan, Row
from zerodrift.policy.nouns import COLUMNS
from zerodrift.report import names, summary


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of one parameter."""

    column: str
    value: str
    """Text of the cell in the table."""
    words: str
    """Value in words, such as `bf16, sharded`."""
    why: str
    """Config key or rule that set the cell. Empty if a frozen parameter has no such column."""


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """Elements of a flattened parameter that one rank of the shard axis owns."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row of the plan, with all that the plan knows about it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    source: str
    """Dtype of the parameter in the model or checkpoint."""
    klass: str
    """Dotted class of the module that owns the parameter, or `""` if unknown."""
    kind: str
    """Special properties, such as `pinned`, `frozen` or `whole`. `""` for none."""
    boundaries: tuple[Boundary, ...]
    """Boundaries of the modules around the parameter, at most one per name."""
    unit: str
    """Module path of the unit that the parameter is gathered with. `""` is the root."""
    pipeline_stage: int
    segment: int
    offset: int
    """First element in the segment."""
    shard: int
    """Ranks of the shard axis."""
    slices: tuple[OwnedRange, ...]
    """Ranges of the sharded columns. Ranks that own no element are left out."""
    cells: tuple[Cell, ...]
    options: tuple[Cell, ...]
    """Unusual options beside the columns: `placement`, `optimizer`."""

    @property
    def divided(self) -> bool:
        """True if the parameter is split over ranks before sharding, as experts are."""
        return any(cell.column == "parallel" for cell in self.options)

    @property
    def sharded(self) -> tuple[str, ...]:
        """Names of the sharded columns."""
        return tuple(cell.column for cell in self.cells if cell.value.endswith("/"))


def explain(plan: Plan, name: str) -> Explanation:
    """Explain the parameter that has this name. Raise ModelError with the nearest names if there is none."""
    return explain_row(plan, names.index_of(plan, name))


def explain_row(plan: Plan, index: int) -> Explanation:
    """Explain the row at an index of `Plan.rows`."""
    row = plan.rows[index]
    modules = {path for name in row.names for path in enclosing_modules(name)}
    options = summary.options(row.columns).items()
    values, words, why = row.columns.cells(), summary.describe_columns(row.columns), row.columns.reasons()
    return Explanation(
        names=row.names,
        shape=row.whole_shape,
        numel=row.whole_numel,
        source=str(row.source),
        klass=row.klass,
        kind=summary.kind(row.columns),
        boundaries=tuple(boundary for boundary in plan.boundaries if boundary.path in modules),
        unit=plan.units[row.unit].name,
        pipeline_stage=plan.units[row.unit].stage,
        segment=row.segment,
        offset=row.offset,
        shard=plan.mesh.shard,
        slices=_slices(plan, row),
        cells=tuple(Cell(column, values[column], words[column], why.get(column, "")) for column in COLUMNS),
        options=tuple(
            Cell(name, row.columns.options()[name], text, why.get(name, "")) for name, text in options
        ),
    )


def _slices(plan: Plan, row: Row) -> tuple[OwnedRange, ...]:
    """Intersect the parameter with the equal contiguous slices of its segment, one per rank. Experts that are
    spread over ranks are cut separately."""
    size, numel = plan.segments[row.segment].padded // plan.slices(plan.segments[row.segment]), row.numel
    if not numel or not size:
        return ()
    slices = []
    for part in range(row.parts):
        for place in range(row.offset // size, (row.offset + numel - 1) // size + 1):
            start, stop = max(place * size - row.offset, 0), min((place + 1) * size - row.offset, numel)
            slices.append(OwnedRange(place * row.parts + part, part * numel + start, part * numel + stop))
    return tuple(slices)
