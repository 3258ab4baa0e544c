"""The invariants of a plan: each is a function that yields its violations.

`build` checks every plan, and a test plants a violation of each invariant. A broken invariant is our defect
and never a mistake in a config, so `require` raises AssertionError.

Invariant: nothing is decided here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

from zerodrift.dtypes import BLOCK, DType
from zerodrift.optimizers import of_type
from zerodrift.plan.boundaries import enclosing_modules
from zerodrift.plan.stages import pieces
from zerodrift.plan.table import Plan
from zerodrift.policy import BACKENDS, COLUMNS, OPTIONS, Master


def names_are_unique(plan: Plan) -> Iterator[str]:
    counts = Counter(name for row in plan.rows for name in row.names)
    yield from (f"{name} is in {count} rows" for name, count in counts.items() if count > 1)


def rows_are_in_one_place(plan: Plan) -> Iterator[str]:
    """Every row is in one segment and one unit, and names both; every segment is in one unit."""
    for kind, lists in (
        ("segment", [segment.rows for segment in plan.segments]),
        ("unit", [unit.rows for unit in plan.units]),
    ):
        places = [(row, number) for number, rows in enumerate(lists) for row in rows]
        if sorted(places) != [(number, getattr(row, kind)) for number, row in enumerate(plan.rows)]:
            yield f"the rows of all {kind}s are not every row once, in the {kind} that it names"
    places = [(segment, number) for number, unit in enumerate(plan.units) for segment in unit.segments]
    if sorted(places) != [(number, segment.unit) for number, segment in enumerate(plan.segments)]:
        yield "the segments of all units are not every segment once, in the unit that it names"


def segments_hold_their_rows(plan: Plan) -> Iterator[str]:
    """Rows start at multiples of BLOCK, do not overlap, and agree in every column of their segment.

    Slices are equal and never cut a block of BLOCK elements.
    """
    for number, segment in enumerate(plan.segments):
        rows = [plan.rows[index] for index in segment.rows]
        end = 0
        for row in rows:
            if row.offset < end:
                yield f"{row.name} overlaps the row before it in segment {number}"
            if row.offset % BLOCK:
                yield f"{row.name} starts at {row.offset}, not on a multiple of {BLOCK}"
            if row.columns.layout != segment.columns.layout:
                yield f"{row.name} differs from segment {number} in a column"
            end = row.offset + row.numel
        if end > segment.padded or segment.numel != sum(row.numel for row in rows):
            yield f"segment {number} ends at {end} of {segment.padded}, and counts {segment.numel} elements"
        sliced = segment.columns.storage.axis != "" or segment.trained
        multiple = BLOCK * (plan.slices(segment) if sliced else 1)
        if segment.padded % multiple:
            yield f"segment {number} has {segment.padded} elements, not a multiple of {multiple}"


def no_slice_cuts_what_is_whole(plan: Plan) -> Iterator[str]:
    """A slice ends inside a row only if the row's placement allows that; Muon gets whole matrices."""
    for number, segment in enumerate(plan.segments):
        size = segment.padded // plan.slices(segment)
        for row in (plan.rows[index] for index in segment.rows):
            update = row.columns.update
            if update is None:
                continue
            has_matrices = len(row.shape) > 1 and update.placement != "sliced"
            if update.optimizer and of_type(update.optimizer).matrices and not has_matrices:
                yield f"{row.name} {list(row.shape)}, {update.placement}, is no whole matrix for Muon"
            if not segment.whole or not row.numel:
                continue
            unit = math.prod(row.shape[-2:]) if update.placement == "matrices" else row.numel
            cuts = range(row.offset // size + 1, (row.offset + row.numel - 1) // size + 1)
            if any((cut * size - row.offset) % unit for cut in cuts):
                yield f"{row.name} is placed {update.placement}, but a slice of segment {number} cuts it"


def pins_hold_everywhere(plan: Plan) -> Iterator[str]:
    for row in (row for row in plan.rows if row.columns.pinned):
        cells = {column: text.rstrip("/") for column, text in row.columns.cells().items() if text != "-"}
        if cells.pop("master", "same") != "same":
            yield f"{row.name} is pinned but has a master of its own"
        del cells["export"]
        if set(cells.values()) != {"fp32"}:
            yield f"{row.name} is pinned but not fp32 in every column"


def nothing_narrows_silently(plan: Plan) -> Iterator[str]:
    """No column loses bits of the column before it, unless the config allows that."""
    allowed = plan.policy.allow_narrow
    for row in plan.rows:
        update = row.columns.update
        if update is None:
            continue
        storage, narrowed = row.columns.storage.dtype, not update.accumulate.dtype.holds(update.grad)
        for fault, found in (
            ("grad is not the compute dtype", update.grad is not row.columns.compute),
            ("accumulate is narrower than grad without allow_narrow", narrowed and not allowed),
            ("sum cannot hold the wire", not update.reduce.sum.holds(update.reduce.wire)),
            (f"a split master over {storage}", update.master is Master.SPLIT and storage is not DType.BF16),
            (
                "two fp32 copies of one value",
                update.master is Master.FP32 and storage is DType.FP32 and row.columns.gather.format is None,
            ),
        ):
            if found:
                yield f"{row.name}: {fault}"


def axes_follow_the_stage(plan: Plan) -> Iterator[str]:
    """The sharding columns agree with the ZeRO stage."""
    stage, everywhere = plan.policy.sharding.stage, BACKENDS[plan.policy.backend].storage_sharded
    for row in plan.rows:
        columns, update = row.columns, row.columns.update
        sharded = columns.storage.axis == "shard"
        if columns.storage.dtype.is_floating and sharded != (stage == 3 or everywhere):
            yield f"{row.name}: storage axis at stage {stage}"
        if update is None:
            continue
        if (update.axis == "shard") != (stage >= 1 or everywhere):
            yield f"{row.name}: master and state axis at stage {stage}"
        if (update.accumulate.axis == "shard") != (update.reduce.when == "every"):
            yield f"{row.name}: accumulate is sharded exactly where every micro-batch is reduced"


def experts_are_divided(plan: Plan) -> Iterator[str]:
    """Columns and rows agree on the parameters that are divided over the expert axis."""
    for row in plan.rows:
        if row.parts != (plan.mesh.expert if row.columns.parallel else 1):
            yield f"{row.name} is in {row.parts} parts on an expert axis of {plan.mesh.expert}"
        if row.columns.parallel and not row.shape:
            yield f"{row.name} has no dimension to be divided"
    if plan.mesh.shard % plan.mesh.expert:
        yield f"an expert axis of {plan.mesh.expert} does not fold a shard axis of {plan.mesh.shard}"


def every_cell_says_why(plan: Plan) -> Iterator[str]:
    for columns in {row.columns for row in plan.rows}:
        wanted = {column for column, text in columns.cells().items() if text != "-"}
        wanted |= set(columns.options())
        order = (*COLUMNS, *OPTIONS)
        missing = [name for name in order if name in wanted and not columns.reasons().get(name)]
        if missing:
            yield f"no reason for {', '.join(missing)}"


def units_are_in_order(plan: Plan) -> Iterator[str]:
    stages = [unit.stage for unit in plan.units]
    if stages != sorted(stages) or set(stages) - set(range(pieces(plan.policy.pipeline, plan.mesh))):
        yield "units are not in order of pipeline stages"
    if plan.units and plan.units[0].name != "":
        yield "the root does not come first"


def boundaries_hold_their_dtype(plan: Plan) -> Iterator[str]:
    """Every parameter inside a boundary computes in its dtype, and no boundary is inside another."""
    held = {boundary.path: boundary for boundary in plan.boundaries}
    if len(held) < len(plan.boundaries):
        yield "a path has two boundaries"
    for boundary in plan.boundaries:
        outer = next((path for path in enclosing_modules(boundary.path) if path in held), None)
        if outer is not None:
            yield f"the boundary {boundary.path} lies inside {outer}"
        if [name for name, reason in boundary.why if reason] != ["dtype", "output"]:
            yield f"no reason for the boundary {boundary.path}"
    empty = set(held)
    for row in plan.rows if held else ():
        for path in (path for name in row.names for path in enclosing_modules(name) if path in held):
            empty.discard(path)
            if row.columns.compute.is_floating and row.columns.compute is not held[path].dtype:
                yield f"{row.name} computes in {row.columns.compute} inside {path}"
    yield from (f"the boundary {path} holds no parameter" for path in sorted(empty))


CHECKS: tuple[Callable[[Plan], Iterator[str]], ...] = (
    names_are_unique,
    rows_are_in_one_place,
    segments_hold_their_rows,
    no_slice_cuts_what_is_whole,
    pins_hold_everywhere,
    nothing_narrows_silently,
    axes_follow_the_stage,
    experts_are_divided,
    every_cell_says_why,
    units_are_in_order,
    boundaries_hold_their_dtype,
)


def find_violations(plan: Plan) -> list[str]:
    """List the violations of a plan as "check: detail"."""
    return [f"{check.__name__}: {detail}" for check in CHECKS for detail in check(plan)]


def require(plan: Plan) -> None:
    violations = find_violations(plan)
    if violations:
        raise AssertionError(
            f"plan of {plan.source} breaks {len(violations)} invariants: " + "; ".join(violations[:5])
        )
