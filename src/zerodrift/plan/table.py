"""The plan as data: a row per parameter, a column per use of a dtype, and the layout of the flat buffers.

`policy` fills the columns, `layout` the segments and `boundaries` the dtype changes of a forward. `build`
joins them and `check` states the invariants. The engine makes no decision of its own. Rows that agree in
every column and every reason share one `Columns` object, so 46,000 rows stay small.

Invariant: a plan is a value. Equal inputs give equal plans, equal JSON and equal digests.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from zerodrift.dtypes import DType
from zerodrift.mesh import MeshShape
from zerodrift.policy import Columns, Output, Policy
from zerodrift.record import decode, encode


@dataclass(frozen=True, slots=True)
class Row:
    names: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape on one rank. A parameter that is divided over the expert axis has the rank's own experts."""
    source: DType
    klass: str
    """Dotted class of the module that owns the parameter, `""` if unknown."""
    columns: Columns
    unit: int
    segment: int
    offset: int
    """First element in the segment; a multiple of BLOCK."""
    parts: int = 1
    """Ranks of the expert axis that divide the first dimension."""

    @property
    def trained(self) -> bool:
        return self.columns.trained

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape in the model and in files."""
        return self.shape if self.parts == 1 else (self.shape[0] * self.parts, *self.shape[1:])

    @property
    def whole_numel(self) -> int:
        """Elements in the model and in files."""
        return self.numel * self.parts

    def within(self, start: int, numel: int) -> slice:
        """Return the row's elements among `numel` of its segment from `start` on, as a slice of these; may be
        empty."""
        low, high = max(self.offset - start, 0), min(self.offset + self.numel - start, numel)
        return slice(low, max(low, high))


@dataclass(frozen=True, slots=True)
class BufferRow:
    """One buffer of the model, with its dtypes before and after."""

    name: str
    shape: tuple[int, ...]
    source: DType
    storage: DType
    why: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """One flat buffer: the rows of a unit that share every column."""

    unit: int
    columns: Columns
    """Columns of the first row. Other rows may differ in `why`, `export`, `output` and `products`."""
    rows: tuple[int, ...]
    """Indices into `Plan.rows`, in order of offset."""
    numel: int
    padded: int
    """Elements allocated: a multiple of BLOCK times the ranks of its axis."""
    copies: tuple[int, ...] = ()
    """Other pieces of a pipeline that use the segment's tied parameter; see `plan/stages.py`."""
    lead: bool = True
    """Whether the segment counts in a norm and in a checkpoint; one of several copies does."""

    @property
    def whole(self) -> bool:
        """Whether no slice of the segment ends inside a matrix."""
        update = self.columns.update
        return update is not None and update.placement != "sliced"

    @property
    def trained(self) -> bool:
        return self.columns.trained

    @property
    def axis(self) -> Literal["shard", "expert_shard"]:
        """The mesh axis that the segment is gathered and reduced over."""
        return "expert_shard" if self.columns.parallel else "shard"


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together: a transformer block, or the root with all the rest."""

    name: str
    """Module path; `""` is the root."""
    rows: tuple[int, ...]
    segments: tuple[int, ...]
    stage: int
    """Piece of a pipeline, 0 without one: a stage, or one of its `pipeline.chunks`."""
    products: int = field(default=0, metadata={"omitted": True})
    """Pipelines only: multiplications per token in the unit's forward."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A module that computes in a dtype of its own."""

    path: str
    dtype: DType
    """Dtype that floating inputs are cast to; autocast is off inside."""
    output: Output
    """`keep` returns results as computed; `input` casts them to the dtype of the first floating input."""
    lookup: DType | None
    """Output dtype of a module without floating inputs, an embedding; None returns results as computed."""
    why: tuple[tuple[str, str], ...]
    """(`dtype`, reason) and (`output`, reason)."""


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first tensor moves.

    A plan is a frozen value that can be printed, compared, hashed and written as JSON.
    """

    source: str
    """The model's name."""
    policy: Policy
    mesh: MeshShape
    rows: tuple[Row, ...]
    """Every parameter, with its columns and its place."""
    buffers: tuple[BufferRow, ...]
    units: tuple[Unit, ...]
    """Units in order of execution; the root comes first."""
    segments: tuple[Segment, ...]
    """The flat buffers; rows of a unit that agree in every column share one."""
    boundaries: tuple[Boundary, ...]
    """The dtype changes of a forward. Without autocast the model's floating inputs are also cast to the
    mode's dtype."""
    notes: tuple[str, ...]
    """Warnings and choices with a cost, for the reader."""

    @cached_property
    def digest(self) -> str:
        """Hex digest over every decision, not over who asked for it; ranks start only if it is equal."""
        beside = ("source", "asked", "notes")
        decided = {key: value for key, value in self.to_json().items() if key not in beside}
        text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def noted(self, more: Iterable[str]) -> Plan:
        """Return the same plan with more notes."""
        return replace(self, notes=(*self.notes, *more))

    def slices(self, segment: Segment) -> int:
        """Return the number of ranks that share a segment."""
        return self.mesh.size(segment.axis)

    def secondary_axis(self, segment: Segment) -> Literal["secondary", "expert_secondary"] | None:
        """Return the axis of the second copy that a backward gathers a segment from, or None without one.

        The root needs none: it stays gathered from a forward to the end of its backward.
        """
        if not segment.columns.storage.axis or self.units[segment.unit].name == "":
            return None
        if segment.axis == "shard":
            return "secondary" if self.mesh.secondary > 1 else None
        fewer = 1 < self.mesh.expert_secondary < self.mesh.expert_shard
        return "expert_secondary" if fewer else None

    def row(self, name: str) -> Row | None:
        """Return the row of a parameter by any of its names, or None."""
        index = self._index.get(name)
        return None if index is None else self.rows[index]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: number for number, row in enumerate(self.rows) for name in row.names}

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON value. Columns are written once, and rows refer to them by number."""
        shared: dict[Columns, int] = {}
        divided = any(row.parts > 1 for row in self.rows)
        rows = []
        for row in self.rows:
            place = [row.unit, row.segment, row.offset, *([row.parts] if divided else [])]
            names, shape = list(row.names), list(row.shape)
            number = shared.setdefault(row.columns, len(shared))
            rows.append([names, shape, row.source.value, row.klass, number, *place])
        tied = any(segment.copies for segment in self.segments)
        segments = []
        for segment in self.segments:
            extent = [segment.numel, segment.padded, *([list(segment.copies)] if tied else [])]
            number = shared.setdefault(segment.columns, len(shared))
            segments.append([segment.unit, number, list(segment.rows), *extent])
        return {
            "source": self.source,
            "policy": encode(self.policy),
            "mesh": encode(self.mesh),
            "columns": [encode(columns) for columns in shared],
            "asked": [encode(columns.asked) for columns in shared],
            "row_fields": [*ROW_FIELDS, *(["parts"] if divided else [])],
            "rows": rows,
            "buffers": encode(self.buffers),
            "units": encode(self.units),
            "segment_fields": [*SEGMENT_FIELDS, *(["copies"] if tied else [])],
            "segments": segments,
            "boundary_fields": list(BOUNDARY_FIELDS),
            "boundaries": [list(encode(boundary).values()) for boundary in self.boundaries],
            "notes": list(self.notes),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """Read a plan that `to_json` wrote."""
        asked = data.get("asked") or [()] * len(data["columns"])
        columns = [
            replace(decode(Columns, item), asked=tuple((column, key) for column, key in keys))
            for item, keys in zip(data["columns"], asked, strict=True)
        ]
        return Plan(
            source=data["source"],
            policy=decode(Policy, data["policy"]),
            mesh=decode(MeshShape, data["mesh"]),
            rows=tuple(
                Row(tuple(names), tuple(shape), DType(source), klass, columns[number], *place)
                for names, shape, source, klass, number, *place in data["rows"]
            ),
            buffers=decode(tuple[BufferRow, ...], data["buffers"]),
            units=decode(tuple[Unit, ...], data["units"]),
            segments=tuple(
                Segment(unit, columns[number], tuple(rows), numel, padded, tuple(copies[0] if copies else ()))
                for unit, number, rows, numel, padded, *copies in data["segments"]
            ),
            boundaries=tuple(
                decode(Boundary, dict(zip(BOUNDARY_FIELDS, values, strict=True)))
                for values in data["boundaries"]
            ),
            notes=tuple(data["notes"]),
        )


ROW_FIELDS = ("names", "shape", "source", "klass", "columns", "unit", "segment", "offset")
SEGMENT_FIELDS = ("unit", "columns", "rows", "numel", "padded")
BOUNDARY_FIELDS = ("path", "dtype", "output", "lookup", "why")
