"""Explanation of one parameter, and the search for parameters by name or glob.

`terminal` shows an explanation as text, `as_json` as JSON, and `engine.explain` returns it. A glob matches
the full name and `*` crosses dots, as in `precision.rules`. The components of a misspelt name are compared,
because a comparison with tens of thousands of names takes seconds.

Invariant: the slices of a parameter cover it exactly once. A search without a match is an error.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from zerodrift.errors import ModelError, nearest
from zerodrift.plan import Boundary, Plan, Row, enclosing_modules
from zerodrift.policy import COLUMNS
from zerodrift.report import summary
from zerodrift.report.rows import template

_OFFERED = 3  # most names in a message


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of one parameter."""

    column: str
    value: str  # text of the cell in the table
    words: str  # value in words, such as `bf16, sharded`
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
    source: str  # dtype of the parameter in the model or checkpoint
    klass: str  # dotted class of the module that owns the parameter, or `""` if unknown
    kind: str
    """Special properties, such as `pinned`, `frozen` or `whole`. `""` for none."""
    boundaries: tuple[Boundary, ...]  # boundaries of the modules around the parameter, at most one per name
    unit: str
    """Module path of the unit that the parameter is gathered with. `""` is the root."""
    pipeline_stage: int
    segment: int
    offset: int  # first element in the segment
    shard: int  # ranks of the shard axis
    slices: tuple[OwnedRange, ...]
    """Ranges of the sharded columns. Ranks that own no element are left out."""
    cells: tuple[Cell, ...]
    options: tuple[Cell, ...]  # unusual options beside the columns: `placement`, `optimizer`

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
    return explain_row(plan, index_of(plan, name))


def explain_row(plan: Plan, index: int) -> Explanation:
    row = plan.rows[index]
    modules = {path for name in row.names for path in enclosing_modules(name)}
    given, options = row.columns.options(), summary.options(row.columns).items()
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
        options=tuple(Cell(name, given[name], text, why.get(name, "")) for name, text in options),
    )


def _slices(plan: Plan, row: Row) -> tuple[OwnedRange, ...]:
    """Intersect the parameter, or each part of spread experts, with the equal slices of its segment."""
    size, numel = plan.segments[row.segment].padded // plan.slices(plan.segments[row.segment]), row.numel
    if not numel or not size:
        return ()
    slices = []
    for part in range(row.parts):
        for place in range(row.offset // size, (row.offset + numel - 1) // size + 1):
            start, stop = max(place * size - row.offset, 0), min((place + 1) * size - row.offset, numel)
            slices.append(OwnedRange(place * row.parts + part, part * numel + start, part * numel + stop))
    return tuple(slices)


def matching(plan: Plan, pattern: str, where: str) -> tuple[int, ...]:
    """Return indices of the rows with a name that the glob matches. `where` names the argument in errors."""
    match = re.compile(fnmatch.translate(pattern)).match
    indices = tuple(index for index, row in enumerate(plan.rows) if any(map(match, row.names)))
    if not indices:
        wider, names = f"*{pattern.strip('*.')}*", [name for row in plan.rows for name in row.names]
        if any(fnmatch.fnmatchcase(name, wider) for name in names):
            todo = f"A glob matches the full name: try `{wider}`."
        else:
            todo = _offer(plan, pattern) or "A glob matches the full name: try `*` at both ends."
        raise ModelError(where, f"must match a parameter of {plan.source}", got=repr(pattern), do=todo)
    return indices


def index_of(plan: Plan, name: str) -> int:
    for index, row in enumerate(plan.rows):
        if name in row.names:
            return index
    todo = _offer(plan, name) or "`zerodrift plan` lists all of them."
    raise ModelError(name, f"must be a parameter of {plan.source}", got="no such name", do=todo)


def _offer(plan: Plan, query: str) -> str:
    """Return a sentence with names or patterns near the query, or `""`."""
    names = [name for row in plan.rows for name in row.names]
    word = query.strip("*.")
    offered = _mended(query, names)
    if not offered and word and "*" not in word:
        found = [name for name in names if word in name]
        offered = list(dict.fromkeys([*found[:1], *found[len(found) // 2 :][:1], *found[-1:]]))
    if not offered:
        first = {template(name): name for name in reversed(names)}
        offered = [first[text] for text in nearest(template(query), first, count=_OFFERED)]
    listed = " or ".join(f"`{name}`" for name in offered[:_OFFERED])
    return f"Did you mean {listed}?" if listed else ""


def _mended(query: str, names: list[str]) -> list[str]:
    """Replace each unknown component by the nearest known one, if the result matches a name."""
    known = {part for name in names for part in name.split(".")}
    words = {part for part in known if not part.isdecimal()}
    parts = []
    for part in query.split("."):
        plain = part.strip("*")
        near = nearest(plain, words) if plain and plain not in known else []
        parts.append(part.replace(plain, near[0]) if near else part)
    fixed = ".".join(parts)
    return [fixed] if fixed != query and fnmatch.filter(names, fixed) else []
