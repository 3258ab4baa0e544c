"""Everything that the plan says about one parameter.

Pure: `terminal` sets it as text, `as_json` as JSON, and `engine.explain` returns it.

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
    """As the table writes it."""
    words: str
    """The value in words: what is sharded, when gradients are reduced."""
    why: str
    """The config key or the rule that set it; empty where a frozen parameter has no such column."""


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """What one rank of the shard axis owns of a parameter, in elements of the flattened parameter."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row of the plan, with everything that the plan knows about it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    numel: int
    source: str
    """The dtype that the model or checkpoint holds it in."""
    klass: str
    """Dotted class of the module that owns it, `""` if unknown."""
    kind: str
    """Words for what sets it apart: `pinned`, `frozen`, `whole`, ...; `""` for nothing."""
    boundaries: tuple[Boundary, ...]
    """Of the modules around it that compute in a dtype of their own: one at most for each of its names."""
    unit: str
    """Module path of what it is gathered with; `""` is the root."""
    pipeline_stage: int
    segment: int
    offset: int
    """First element within the segment."""
    shard: int
    """Ranks of the shard axis."""
    slices: tuple[OwnedRange, ...]
    """Of the columns that are sharded; ranks that own nothing of it are left out."""
    cells: tuple[Cell, ...]
    options: tuple[Cell, ...]
    """What it has beside its columns, where that is not as usual: `placement`, `optimizer`."""

    @property
    def divided(self) -> bool:
        """Whether different ranks have different parts of it before anything is sharded."""
        return any(cell.column == "parallel" for cell in self.options)

    @property
    def sharded(self) -> tuple[str, ...]:
        """The columns that live in slices."""
        return tuple(cell.column for cell in self.cells if cell.value.endswith("/"))


def explain(plan: Plan, name: str) -> Explanation:
    """The row of a parameter, by any of its names; ModelError with the nearest names if there is none."""
    return explain_row(plan, names.index_of(plan, name))


def explain_row(plan: Plan, index: int) -> Explanation:
    """The row at an index of `Plan.rows`."""
    row = plan.rows[index]
    modules = {path for name in row.names for path in enclosing_modules(name)}
    options = summary.options(row.columns).items()
    values, words, why = row.columns.cells(), summary.spelled(row.columns), row.columns.reasons()
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
    """Each rank owns one equal contiguous slice of the segment; this is the parameter's part of each, of its
    own experts where these are spread."""
    size, numel = plan.segments[row.segment].padded // plan.slices(plan.segments[row.segment]), row.numel
    if not numel or not size:
        return ()
    slices = []
    for part in range(row.parts):
        for place in range(row.offset // size, (row.offset + numel - 1) // size + 1):
            start, stop = max(place * size - row.offset, 0), min((place + 1) * size - row.offset, numel)
            slices.append(OwnedRange(place * row.parts + part, part * numel + start, part * numel + stop))
    return tuple(slices)
