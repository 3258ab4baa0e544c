"""The layout of parameters: units from names, segments from columns, offsets from sizes.

Section 4 of `docs/architecture.md` says what units and segments are. Packing alone decides where the cuts of
slices fall, so an optimizer gets whole parameters or whole matrices by the offsets in its segment.

Invariant: pure arithmetic. Every parameter is in exactly one unit, and offsets are multiples of BLOCK.
"""

from __future__ import annotations

import fnmatch
import heapq
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from zerodrift.dtypes import BLOCK
from zerodrift.errors import ConfigError, Problems, did_you_mean
from zerodrift.model import ModelSpec, ParameterSpec
from zerodrift.plan.boundaries import enclosing_modules
from zerodrift.plan.stages import even_by_cost, products
from zerodrift.policy import Columns, Placement

BlockOf = Callable[[str], str]
"""Parameter name -> name of its block, `""` for none."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# --- units ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Members:
    """A unit before its segments are known."""

    name: str
    parameters: tuple[int, ...]
    stage: int
    copies: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> the other pieces of a pipeline that use it."""
    products: int = 0
    """Pipelines only: multiplications per token in the unit's forward."""


def find_units(
    model: ModelSpec, patterns: Sequence[str], stages: int, split: Literal["layers", "cost"] = "layers"
) -> list[Members]:
    """Divide a model into units in order of execution: for each piece its root, then its blocks."""
    block_of = _by_pattern(model, patterns) if patterns else _by_number(model)
    blocks: dict[str, list[int]] = {}
    rest: list[int] = []
    for index, parameter in enumerate(model.parameters):
        blocks_of = {block_of(name) for name in parameter.names}
        block = blocks_of.pop() if len(blocks_of) == 1 else ""
        if block:
            blocks.setdefault(block, []).append(index)
        else:
            rest.append(index)
    first_block = min((members[0] for members in blocks.values()), default=0)
    if stages > max(1, len(blocks)):
        must = f"must not exceed the number of blocks, {len(blocks)}"
        do = "Use fewer stages, or name finer units in `sharding.units`."
        raise ConfigError("pipeline.stages", must, got=stages, do=do)
    if stages == 1:
        return [Members("", tuple(rest), 0), *(Members(name, tuple(of), 0) for name, of in blocks.items())]
    stage_of = {name: number * stages // len(blocks) for number, name in enumerate(blocks)}
    costs = {name: sum(products(model.parameters[i]) for i in block) for name, block in blocks.items()}
    ends = [i for i in rest if _root_stage(i, first_block, stages) or len(model.parameters[i].names) > 1]
    after = sum(products(model.parameters[i]) for i in ends)
    if split == "cost":
        sizes = even_by_cost(list(costs.values()), stages, after)
        stage_of = dict(zip(blocks, (s for s, size in enumerate(sizes) for _ in range(size)), strict=True))
    units = []
    for stage in range(stages):
        root = [i for i in rest if _root_stage(i, first_block, stages) == stage]
        if root or stage == 0:
            copies: dict[int, tuple[int, ...]] = {}
            for i in root:
                # A later name outside of the blocks belongs to the last piece: the head of a tied embedding.
                later = model.parameters[i].names[1:]
                others = {stage_of.get(block_of(name), stages - 1) for name in later} - {stage}
                copies |= {i: tuple(sorted(others))} if others else {}
            units.append(Members("", tuple(root), stage, copies))
        here = [name for name in blocks if stage_of[name] == stage]
        units += [Members(name, tuple(blocks[name]), stage, products=costs[name]) for name in here]
    # The last unit also carries the cost behind the blocks: the root of a tied head is elsewhere.
    return [*units[:-1], replace(units[-1], products=units[-1].products + after)]


def _root_stage(index: int, first_block: int, stages: int) -> int:
    """Return the stage of a parameter outside of the blocks: first for embeddings, last for the head."""
    return 0 if index < first_block else stages - 1


def _by_number(model: ModelSpec) -> BlockOf:
    """Find blocks by number: the outermost numbered modules that hold modules of their own.

    Except that a module without a forward, such as a list in a list, is never called: its children are
    blocks.
    """
    holders: set[str] = set()
    for parameter in model.parameters:
        for name in parameter.names:
            holders.update(prefix for prefix, depth in _numbered(name) if depth >= 2)

    def block_of(name: str) -> str:
        block = next((prefix for prefix, _ in _numbered(name) if prefix in holders), "")
        if not block:
            return ""
        inside = [path for path in reversed(list(enclosing_modules(name))) if path.startswith(block)]
        return next((path for path in inside if path not in model.containers), "")

    return block_of


def _numbered(name: str) -> list[tuple[str, int]]:
    """List the numbered prefixes of a name, outermost first, as (prefix, number of components after it)."""
    parts = name.split(".")
    return [
        (".".join(parts[: place + 1]), len(parts) - place - 1)
        for place, part in enumerate(parts[:-1])
        if part.isdecimal()
    ]


def _by_pattern(model: ModelSpec, patterns: Sequence[str]) -> BlockOf:
    """Find blocks by the config's patterns; the innermost module that matches wins."""
    paths = {path for p in model.parameters for name in p.names for path in enclosing_modules(name)}
    found = [{path for path in paths if _matches(path, pattern)} for pattern in patterns]
    problems = Problems()
    for number, (pattern, matched) in enumerate(zip(patterns, found, strict=True)):
        if not matched:
            shapes = sorted({re.sub(r"\d+", "*", path) for path in paths})
            hint = did_you_mean(pattern, shapes) or f"Modules here: {', '.join(shapes[:4])}."
            must = f"must match a module of {model.source}"
            problems.add(f"sharding.units[{number}]", must, got=f"no match for {pattern!r}", do=hint)
    problems.raise_as(ConfigError)
    chosen = set[str]().union(*found)

    def block_of(name: str) -> str:
        return next((path for path in enclosing_modules(name) if path in chosen), "")

    return block_of


def _matches(path: str, pattern: str) -> bool:
    """Match a module path by a glob; `*` stays within one component."""
    parts, globs = path.split("."), pattern.split(".")
    return len(parts) == len(globs) and all(map(fnmatch.fnmatchcase, parts, globs))


# --- segments ---------------------------------------------------------------------------------------


def group(
    parameters: Sequence[int], columns: Sequence[Columns], copies: Container[int] = ()
) -> list[list[int]]:
    """Group the parameters of a unit into segments by their columns.

    Except that a stack which is cut between its matrices is a segment alone, because its matrices set the
    length of a slice, and so is a parameter that is tied across the pipeline: one of `copies`.
    """
    groups: dict[object, list[int]] = {}
    for index in parameters:
        update = columns[index].update
        alone = index if update is not None and update.placement == "matrices" else None
        groups.setdefault((columns[index].layout, alone), []).append(index)
    parts: list[list[int]] = []
    for indices in groups.values():
        rest = [index for index in indices if index not in copies]
        parts += [*([rest] if rest else []), *([index] for index in indices if index in copies)]
    return parts


Packed = tuple[tuple[int, ...], int]
"""The offsets of parameters in a segment, and the elements that it allocates."""


def pack(parameters: Sequence[ParameterSpec], slices: int, placement: Placement = "sliced") -> Packed:
    if placement == "whole" and slices > 1:
        return _pack_whole([round_up(parameter.numel, BLOCK) for parameter in parameters], slices)
    if placement == "matrices" and slices > 1:  # slices end between two matrices and between two blocks
        matrix = max(1, math.prod(parameters[0].shape[-2:]))
        step = BLOCK // math.gcd(matrix, BLOCK)  # matrices that fill whole blocks
        return (0,), round_up(-(-parameters[0].numel // (matrix * slices)), step) * matrix * slices
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(end)
        end = round_up(end + parameter.numel, BLOCK)
    return tuple(offsets), round_up(end, BLOCK * slices)


def _pack_whole(lengths: Sequence[int], slices: int) -> Packed:
    """Pack whole parameters into slices, longest first, each into the first slice with the least in it.

    The result is at worst a third longer than the best packing, and the same on every rank.
    """
    filled = [(0, number) for number in range(min(slices, len(lengths)))]  # more would stay empty
    places: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length, number = filled[0]
        places[index] = (number, length)
        heapq.heapreplace(filled, (length + lengths[index], number))
    size = max(length for length, _ in filled)
    return tuple(number * size + start for number, start in places), size * slices


# --- small segments ---------------------------------------------------------------------------------

MIN_SLICED_ELEMENTS = 1 << 16
"""Small segments are moved if a segment on this many ranks has at least so many elements."""


def move_small_segments(
    units: Sequence[Members], columns: Sequence[Columns], model: ModelSpec, slices: int
) -> list[Members]:
    """Move small segments of blocks to the root, where segments of one kind are one segment.

    A slice is at least one block of 256 elements, because norms, scales and random rounding work on whole
    blocks. So on N ranks a segment has at least 256 N elements, in memory and in every message: a million on
    4096 ranks, for the two pinned norms of a block. The root is gathered once and stays to the end of the
    backward, which is one message for the small segments of all blocks.

    Segments stay where they are if the move would hold more memory than it saves, and on fewer than 256
    ranks, where padding costs less than a message.
    """
    least = BLOCK * slices
    if least < MIN_SLICED_ELEMENTS:
        return list(units)
    largest = 0
    kinds: dict[object, list[tuple[list[int], int]]] = {}
    for parameters in (held for unit in units if unit.name for held in group(unit.parameters, columns)):
        size = sum(round_up(model.parameters[index].numel, BLOCK) for index in parameters)
        largest, shared = max(largest, size), columns[parameters[0]]
        update = shared.update
        is_sliced = shared.storage.axis != "" if update is None else update.placement == "sliced"
        if 2 * size <= least and is_sliced and not shared.parallel:
            kinds.setdefault(shared.layout, []).append((parameters, size))
    budget = max(4 * least, largest // 8)  # four such segments, or blocks, are alive at once in any case
    moved = {
        index
        for alike in kinds.values()
        if len(alike) > 1 and sum(size for _, size in alike) <= budget
        for parameters, _ in alike
        for index in parameters
    }
    kept = []
    for unit in units:
        if not unit.name:
            kept.append(replace(unit, parameters=tuple(sorted((*unit.parameters, *moved)))))
        elif rest := tuple(index for index in unit.parameters if index not in moved):  # none left: no unit
            kept.append(replace(unit, parameters=rest))
    return kept
