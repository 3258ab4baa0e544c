"""The promises of a plan to its reader, each a function that yields its violations.

`build` checks every plan, and a test plants a violation of each promise. A broken promise is never a mistake
in a config, but our defect, so `require` raises AssertionError.

Invariant: nothing is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from zerodrift.dtypes import BLOCK, DType
from zerodrift.optimizers import of_type
from zerodrift.plan.boundaries import enclosing_modules
from zerodrift.plan.table import Plan
from zerodrift.policy import COLUMNS, OPTIONS, Master


def segments_hold_their_rows(plan: Plan) -> Iterator[str]:
    """Rows start at multiples of BLOCK, do not overlap, and agree in every column of their segment.

    Slices are equal and never cut a block of BLOCK elements.
    """
    for number, segment in enumerate(plan.segments):
        end = 0
        for row in (plan.rows[index] for index in segment.rows):
            if row.offset < end or row.offset % BLOCK:
                yield f"{row.name} starts at {row.offset} of segment {number}, behind {end}"
            if row.columns.layout != segment.columns.layout:
                yield f"{row.name} differs from segment {number} in a column"
            end = row.offset + row.numel
        sliced = segment.columns.storage.axis != "" or segment.trained
        multiple = BLOCK * (plan.slices(segment) if sliced else 1)
        if end > segment.padded or segment.padded % multiple:
            yield f"segment {number} ends at {end} of {segment.padded}, a multiple of {multiple}"


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
            yield f"{row.name} is pinned but has a separate master"
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
        ):
            if found:
                yield f"{row.name}: {fault}"


def every_cell_says_why(plan: Plan) -> Iterator[str]:
    for columns in {row.columns for row in plan.rows}:
        wanted = {column for column, text in columns.cells().items() if text != "-"}
        wanted |= set(columns.options())
        reasons = columns.reasons()
        missing = [name for name in (*COLUMNS, *OPTIONS) if name in wanted and not reasons.get(name)]
        if missing:
            yield f"no reason for {', '.join(missing)}"


def boundaries_hold_their_dtype(plan: Plan) -> Iterator[str]:
    """Every parameter inside a boundary computes in its dtype, and no boundary is inside another."""
    held = {boundary.path: boundary.dtype for boundary in plan.boundaries}
    for path in held:
        outer = next((around for around in enclosing_modules(path) if around in held), None)
        if outer is not None:
            yield f"the boundary {path} lies inside {outer}"
    for row in plan.rows if held else ():
        for path in (path for name in row.names for path in enclosing_modules(name) if path in held):
            if row.columns.compute.is_floating and row.columns.compute is not held[path]:
                yield f"{row.name} computes in {row.columns.compute} inside {path}"


CHECKS: tuple[Callable[[Plan], Iterator[str]], ...] = (
    segments_hold_their_rows,
    no_slice_cuts_what_is_whole,
    pins_hold_everywhere,
    nothing_narrows_silently,
    every_cell_says_why,
    boundaries_hold_their_dtype,
)


def find_violations(plan: Plan) -> list[str]:
    """List the violations of a plan as "check: detail"."""
    return [f"{check.__name__}: {detail}" for check in CHECKS for detail in check(plan)]


def require(plan: Plan) -> None:
    violations = find_violations(plan)
    if violations:
        raise AssertionError(
            f"plan of {plan.source} breaks {len(violations)} promises: " + "; ".join(violations[:5])
        )
