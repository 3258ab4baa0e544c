"""The invariants of a plan: each is a function that yields its violations.

`build` checks every plan, and a test plants a violation of each invariant. A broken invariant is our defect
and never a mistake in a config, so `require` raises AssertionError.

Invariant: nothing is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from zerodrift.dtypes import BLOCK, DType
from zerodrift.optimizers import of_type
from zerodrift.plan.boundaries import enclosing_modules
from zerodrift.plan.stages import pieces
from zerodrift.plan.table import Plan
from zerodrift.policy.backends import BACKENDS
from zerodrift.policy.nouns import COLUMNS, OPTIONS, Master

Check = Callable[[Plan], Iterator[str]]


def names_are_unique(plan: Plan) -> Iterator[str]:
    seen: set[str] = set()
    for row in plan.rows:
        for name in row.names:
            if name in seen:
                yield f"{name} is in two rows"
            seen.add(name)


def rows_are_in_one_place(plan: Plan) -> Iterator[str]:
    """Every row is in one segment and one unit, and names both; every segment is in one unit."""
    for kind, lists in (
        ("segment", [segment.rows for segment in plan.segments]),
        ("unit", [unit.rows for unit in plan.units]),
    ):
        held = [row for rows in lists for row in rows]
        if sorted(held) != list(range(len(plan.rows))):
            yield f"the rows of all {kind}s are not every row once"
        for number, rows in enumerate(lists):
            for row in rows:
                if 0 <= row < len(plan.rows) and getattr(plan.rows[row], kind) != number:
                    yield f"{plan.rows[row].name} is in {kind} {number} but says otherwise"
    held = [segment for unit in plan.units for segment in unit.segments]
    if sorted(held) != list(range(len(plan.segments))):
        yield "the segments of all units are not every segment once"
    for number, segment in enumerate(plan.segments):
        if number not in plan.units[segment.unit].segments:
            yield f"segment {number} is not in its unit"


def rows_do_not_overlap(plan: Plan) -> Iterator[str]:
    for number, segment in enumerate(plan.segments):
        end = 0
        for row in (plan.rows[index] for index in segment.rows):
            if row.offset < end:
                yield f"{row.name} overlaps the row before it in segment {number}"
            end = row.offset + row.numel
        if end > segment.padded:
            yield f"segment {number} ends at {end}, beyond its {segment.padded} elements"
        if segment.numel != sum(plan.rows[index].numel for index in segment.rows):
            yield f"segment {number} miscounts its elements"


def starts_are_aligned(plan: Plan) -> Iterator[str]:
    for row in plan.rows:
        if row.offset % BLOCK:
            yield f"{row.name} starts at {row.offset}, not on a multiple of {BLOCK}"


def slices_are_equal_blocks(plan: Plan) -> Iterator[str]:
    """Slices are equal and never cut a block of BLOCK elements."""
    for number, segment in enumerate(plan.segments):
        sliced = segment.columns.storage.axis != "" or segment.trained
        multiple = BLOCK * (plan.slices(segment) if sliced else 1)
        if segment.padded % multiple:
            yield f"segment {number} has {segment.padded} elements, not a multiple of {multiple}"


def no_slice_cuts_what_is_whole(plan: Plan) -> Iterator[str]:
    """A slice ends inside a row only if the row's placement allows that."""
    for number, segment in enumerate(plan.segments):
        if not segment.whole:
            continue
        size = segment.padded // plan.slices(segment)
        for row in (plan.rows[index] for index in segment.rows if plan.rows[index].numel):
            update = row.columns.update
            matrices = update is not None and update.placement == "matrices"
            unit = math.prod(row.shape[-2:]) if matrices else row.numel
            cuts = range(row.offset // size + 1, (row.offset + row.numel - 1) // size + 1)
            if any((cut * size - row.offset) % unit for cut in cuts):
                what = "a matrix of it" if matrices else "it"
                yield f"{row.name} is placed whole, but a slice of segment {number} cuts {what}"


def matrix_updates_get_matrices(plan: Plan) -> Iterator[str]:
    """Parameters that Muon updates have two dimensions or more and are not cut inside a matrix."""
    for row in plan.rows:
        update = row.columns.update
        if update is None or not update.optimizer or not of_type(update.optimizer).matrices:
            continue
        if len(row.shape) < 2 or update.placement == "sliced":
            shape = f"{list(row.shape)}, {update.placement}"
            yield f"{row.name} {shape}, is no whole matrix for {update.optimizer}"


def segments_are_uniform(plan: Plan) -> Iterator[str]:
    for number, segment in enumerate(plan.segments):
        for index in segment.rows:
            if plan.rows[index].columns.layout != segment.columns.layout:
                yield f"{plan.rows[index].name} differs from segment {number} in a column"


def pins_hold_everywhere(plan: Plan) -> Iterator[str]:
    for row in plan.rows:
        columns = row.columns
        if not columns.pinned:
            continue
        dtypes = [columns.storage.dtype, columns.gather, columns.compute]
        update = columns.update
        if update is not None:
            dtypes += [update.grad, update.accumulate.dtype, update.reduce.wire, update.reduce.sum]
            dtypes += [update.state.dtype]
            if update.master is not Master.SAME:
                yield f"{row.name} is pinned but has a master of its own"
        if any(dtype is not DType.FP32 for dtype in dtypes):
            yield f"{row.name} is pinned but not fp32 in every column"


def nothing_narrows_silently(plan: Plan) -> Iterator[str]:
    """No column loses bits of the column before it, unless the config allows that."""
    for row in plan.rows:
        update = row.columns.update
        if update is None:
            continue
        if update.grad is not row.columns.compute:
            yield f"{row.name}: grad is not the compute dtype"
        if not update.accumulate.dtype.holds(update.grad) and not plan.policy.allow_narrow:
            yield f"{row.name}: accumulate is narrower than grad without allow_narrow"
        if not update.reduce.sum.holds(update.reduce.wire):
            yield f"{row.name}: sum cannot hold the wire"
        if update.master is Master.SPLIT and row.columns.storage.dtype is not DType.BF16:
            yield f"{row.name}: a split master over {row.columns.storage.dtype}"
        if update.master is Master.FP32 and row.columns.storage.dtype is DType.FP32:
            yield f"{row.name}: two fp32 copies of one value"


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


CHECKS: tuple[Check, ...] = (
    names_are_unique,
    rows_are_in_one_place,
    rows_do_not_overlap,
    starts_are_aligned,
    slices_are_equal_blocks,
    no_slice_cuts_what_is_whole,
    matrix_updates_get_matrices,
    segments_are_uniform,
    pins_hold_everywhere,
    nothing_narrows_silently,
    axes_follow_the_stage,
    experts_are_divided,
    every_cell_says_why,
    units_are_in_order,
    boundaries_hold_their_dtype,
)
"""Every invariant of a plan."""


def find_violations(plan: Plan) -> list[str]:
    """List the violations of a plan as "check: detail"."""
    return [f"{check.__name__}: {detail}" for check in CHECKS for detail in check(plan)]


def require(plan: Plan) -> None:
    """Raise AssertionError unless every invariant holds."""
    violations = find_violations(plan)
    if violations:
        raise AssertionError(
            f"plan of {plan.source} breaks {len(violations)} invariants: " + "; ".join(violations[:5])
        )
