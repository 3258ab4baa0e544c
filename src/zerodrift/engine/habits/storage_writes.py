"""Notice writes of user code to parameters, and copy them into the master or refuse them by name.

[Note: writing] Between steps user code may write to a parameter that rests whole, in place (which moves its
version counter) or through `.data` (which does not). If storage is the master, the write is the new value. If
an optimizer keeps a master elsewhere, prints of storage show the write. An fp32 master takes over elements
that differ from its rounding. For a split master a write is an error, because the low halves do not show
which elements were written. A write to the gathered form in a forward is an error, because it is lost when
the memory is freed. Such writes through `.data` are looked for before some releases only, since a script that
writes in one forward writes in all; so are differences between ranks in frozen values that rest whole.

A script may also assign other memory to `.data` of a parameter that rests whole. As in plain torch the model
computes with that memory; the next step copies it into storage.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

from zerodrift.engine.segment import FlatSegment, is_due, missing_value
from zerodrift.engine.trained_segment import TrainedSegment
from zerodrift.errors import ModelError, Problems
from zerodrift.kernels import BYTES, prints
from zerodrift.optim import Updater
from zerodrift.plan import Row
from zerodrift.policy import Master

WRITE = "must be written inside `engine.gathered(write=True)`"
READ = "a write inside `engine.gathered()`, which shows values"
WRITTEN_ABSENT = "a write to its placeholder"
_GATHERED = "The values were gathered only for the forward, and the write was lost."
_SPLIT = (
    "A split master cannot tell which elements changed. Write there, or set `precision.master: fp32`, "
    "which accepts such writes."
)
_VERSION = operator.attrgetter("_version")


def record_versions(segment: FlatSegment) -> None:
    """Record that the engine has written the present values of storage and parameters."""
    _record_parameter_versions(segment)
    if segment.has_separate_master:
        segment.storage_prints = prints(segment.storage)


def _record_parameter_versions(segment: FlatSegment) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        segment.versions = list(map(_VERSION, segment.parameters))


def mark_storage_changed(segment: FlatSegment) -> None:
    """Record that the engine has changed values. A backward through a graph that used the old ones must
    raise, as in plain torch."""
    torch.autograd.graph.increment_version(segment.parameters)
    record_versions(segment)


# --- memory that was assigned to `.data` ------------------------------------------------------------------


def may_stand_in(segment: FlatSegment, index: int) -> bool:
    """Return True if a parameter may have memory of its own until the step copies it into storage."""
    parameter, home = segment.parameters[index], segment.expected_views[index]
    alike = (parameter.shape, parameter.dtype, parameter.device) == (home.shape, home.dtype, home.device)
    return alike and not segment.gathers and not segment.holds


@torch.no_grad()
def take_back_memory(segment: FlatSegment) -> None:
    """Copy memory that was assigned to `.data` of frozen parameters into storage, before values are read.
    Raise for trained ones: a script that evaluates averaged weights assigns the former memory again."""
    problems = Problems()
    for row, parameter, home in zip(segment.rows, segment.parameters, segment.expected_views, strict=True):
        if segment.gathers or segment.holds or parameter.data_ptr() == home.data_ptr():
            continue
        if row.trained:
            must = "must have its own memory again when values are read or saved"
            do = "First assign the old `.data` again, or write with `copy_`."
            problems.add(row.name, must, got="memory that was assigned to `.data`", do=do)
        else:
            home.copy_(parameter)
            parameter.data = home
    problems.raise_as(ModelError)


# --- the full form in a context -------------------------------------------------------------------------


def hold_full(segment: FlatSegment) -> None:
    """Keep the full form until `end_hold`; all ranks must have started the gather. Parameters that show
    storage itself show a copy meanwhile, so that values outlive an update and writes can be dropped."""
    segment.holds += 1
    if segment.holds > 1:
        return
    segment.finish_gather()
    if not segment.gathers:
        segment.replace_full(segment.storage.clone())
    segment.held_prints = prints(segment.full)


def end_hold(segment: FlatSegment, *, keep: bool = False) -> None:
    """End a hold."""
    segment.holds -= 1
    if segment.holds:
        return
    segment.held_prints = None
    _record_parameter_versions(segment)
    if not segment.gathers:
        segment.replace_full(segment.storage)
        segment.is_stale = False
    elif segment.is_stale:
        segment.drop()
    elif not keep:
        segment.release()


def refresh_views(segment: FlatSegment) -> None:
    """Show new values of storage in a held full form."""
    if not segment.holds:
        return
    if not segment.gathers:
        with torch.no_grad():
            segment.full.copy_(segment.storage)
    else:
        segment.is_full = False
        segment.finish_gather()
    segment.is_stale = False
    segment.held_prints = prints(segment.full)


def rows_written_while_held(segment: FlatSegment) -> list[Row]:
    """Return the rows that were written to since the full form was held or refreshed."""
    before = segment.held_prints
    return [] if before is None else _rows_of(segment, before != prints(segment.full), segment.full)


# --- writes outside of a context -------------------------------------------------------------------------


def rows_with_new_version(segment: FlatSegment) -> list[Row]:
    """Return the rows whose parameters were written in place, by their version counters."""
    before = segment.versions
    with torch._C.DisableTorchFunctionSubclass():
        if not before or list(map(_VERSION, segment.parameters)) == before:
            return []
    versions = zip(segment.rows, segment.parameters, before, strict=True)
    return [row for row, parameter, version in versions if parameter._version != version]


def share_placeholders(segments: Iterable[FlatSegment]) -> list[torch.Tensor]:
    """Put the placeholders of all segments into one tensor per dtype, so that one check covers them."""
    by_dtype: dict[torch.dtype, list[FlatSegment]] = {}
    for segment in segments:
        by_dtype.setdefault(segment.full.dtype, []).append(segment)
    shared = []
    for alike in by_dtype.values():
        shared.append(torch.cat([segment.placeholder_elements for segment in alike]))
        counts = [len(segment.rows) for segment in alike]
        for segment, elements in zip(alike, shared[-1].split(counts), strict=True):
            segment.use_placeholders(elements)
    return shared


def are_missing(placeholders: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements that still have the value of a placeholder."""
    value = missing_value(placeholders.dtype)
    return placeholders.isnan() if isinstance(value, float) else placeholders == value


def rows_written_while_absent(segment: FlatSegment) -> list[Row]:
    """Return the rows whose placeholder was written, and restore the placeholders."""
    missing = are_missing(segment.placeholder_elements).tolist()
    segment.placeholder_elements.fill_(missing_value(segment.full.dtype))
    return [row for row, same in zip(segment.rows, missing, strict=True) if not same]


def check_storage(segments: Iterable[FlatSegment], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, as int64 on the device, (whether user code has written to storage, a 32-bit checksum of the
    storage that is the same on all ranks)."""
    now, before, alike, differing = [], [], [], []
    for segment in segments:
        if segment.gathers:
            differing += [] if segment.overwritten is None else [segment.overwritten]
            continue
        due = segment.spec.columns.trained or is_due(segment.storage_checks)
        is_alike = segment.axis == "shard" and not segment.sharded and due
        segment.storage_checks += 1
        if not (is_alike or segment.storage_prints is not None):
            continue
        found = prints(segment.storage)
        alike += [found] if is_alike else []
        if segment.storage_prints is not None:
            now.append(found)
            before.append(segment.storage_prints)
    differing += [torch.cat(now) != torch.cat(before)] if now else []
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    written = torch.cat(differing).any().long() if differing else nothing
    return written, torch.cat(alike).sum() & 0xFFFFFFFF if alike else nothing


def _rows_of(segment: FlatSegment, blocks: torch.Tensor, like: torch.Tensor, first: int = 0) -> list[Row]:
    """Return the rows with elements in the marked blocks of a buffer like `like`, which begins with element
    `first` of the segment."""
    size = like.element_size()
    if not blocks.any():
        return []
    spans = ((max(0, row.offset - first), max(0, row.offset + row.numel - first)) for row in segment.rows)
    return [
        row
        for row, (start, end) in zip(segment.rows, spans, strict=True)
        if blocks[start * size // BYTES : -(-end * size // BYTES)].any()
    ]


@torch.no_grad()
def take_over_writes(segment: FlatSegment, updater: Updater | None, *, accept_all: bool = False) -> None:
    """Copy writes of user code to this rank's storage into the master, or raise; see [Note: writing]. With
    `accept_all`, all elements of a written block of a split master take the values of storage."""
    problems = Problems()
    for row in rows_written_while_absent(segment) if segment.gathers else ():
        problems.add(row.name, WRITE, got=WRITTEN_ABSENT, do="It was lost.")
    overwritten, segment.overwritten = segment.overwritten, None
    first = segment.rank * (segment.spec.padded // segment.ranks) if segment.sharded else 0
    for row in () if overwritten is None else _rows_of(segment, overwritten, segment.full, first):
        problems.add(row.name, WRITE, got="a write to its values in a forward, through `.data`", do=_GATHERED)
    problems.raise_as(ModelError)
    before = segment.storage_prints
    blocks = None if before is None else before != prints(segment.storage)
    rows = [] if blocks is None else _rows_of(segment, blocks, segment.storage)
    if not rows or blocks is None or not isinstance(segment, TrainedSegment) or updater is None:
        return
    master, shown = updater.master(segment.number), segment.owned.float()
    if segment.narrow is not None:
        for row in rows:
            got = f"a write to values that are rounded to {segment.narrow}"
            problems.add(row.name, WRITE, got=got, do="Write there.")
        problems.raise_as(ModelError)
    if segment.update.master is not Master.SPLIT:
        written = segment.at_rest(master).float() != shown
    elif accept_all:
        elements = blocks.repeat_interleave(BYTES // segment.storage.element_size())
        written = segment.owned_of(elements[: segment.spec.padded])
    else:
        for row in rows:
            problems.add(row.name, WRITE, got="a write to its bf16 storage", do=_SPLIT)
        problems.raise_as(ModelError)
    updater.set_master(segment.number, torch.where(written, shown, master))
    record_versions(segment)
