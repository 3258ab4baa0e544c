"""What of blocks is gathered with the root, because by itself it would be little but padding.

A slice is at least one block of 256 elements, since norms, scales and random rounding are of whole blocks.
So on N ranks a segment is at least 256 N elements long, in memory and in every message: on 4096 ranks a
million for the two norms of a block that are pinned. Such segments of all blocks are one segment of the root
instead, which is gathered once and stays to the end of the backward; that is one message for all of them.

Where that would hold more memory than it saves, and on fewer than 256 ranks, where padding costs less than a
message, they stay. So do units that a config names.

Invariant: pure arithmetic on sizes and columns; where a parameter lies changes no bit of any value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zerodrift.dtypes import BLOCK
from zerodrift.model.spec import ModelSpec
from zerodrift.plan.layout import Members, group, round_up
from zerodrift.policy.nouns import Columns

WORTH_MOVING = 1 << 16
"""Elements that a segment has at least from which on small ones are looked for."""


@dataclass(frozen=True, slots=True)
class _Small:
    """What would be a segment of a block."""

    parameters: list[int]
    size: int
    """Elements, without the padding at its end."""


def with_the_root(
    units: Sequence[Members], columns: Sequence[Columns], model: ModelSpec, slices: int
) -> list[Members]:
    """The units, with what is small moved to the root."""
    least = BLOCK * slices
    if least < WORTH_MOVING:
        return list(units)
    largest = 0
    kinds: dict[object, list[_Small]] = {}
    for parameters in (held for unit in units if unit.name for held in group(unit.parameters, columns)):
        size = sum(round_up(model.parameters[index].numel, BLOCK) for index in parameters)
        largest, shared = max(largest, size), columns[parameters[0]]
        if 2 * size <= least and _is_cut_anywhere(shared):
            kinds.setdefault(shared.layout, []).append(_Small(parameters, size))
    room = max(4 * least, largest // 8)  # four such segments, or blocks, are alive at once in any case
    moved = {
        index
        for alike in kinds.values()
        if len(alike) > 1 and sum(small.size for small in alike) <= room
        for small in alike
        for index in small.parameters
    }
    return _moved(units, moved)


def _is_cut_anywhere(columns: Columns) -> bool:
    if columns.parallel:
        return False
    update = columns.update
    return columns.storage.axis != "" if update is None else update.placement == "sliced"


def _moved(units: Sequence[Members], moved: set[int]) -> list[Members]:
    """A block that has nothing left is no unit."""
    kept = []
    for unit in units:
        if not unit.name:
            kept.append(replace(unit, parameters=tuple(sorted((*unit.parameters, *moved)))))
        elif rest := tuple(index for index in unit.parameters if index not in moved):
            kept.append(replace(unit, parameters=rest))
    return kept


def note(before: Sequence[Members], after: Sequence[Members]) -> Iterator[str]:
    """What a person should know of it."""
    count = len(after[0].parameters) - len(before[0].parameters)
    if count:
        yield (
            f"{count:,} small parameters of blocks are gathered with what is in no block, once: for so many "
            f"ranks each block's would be more padding than values"
        )
