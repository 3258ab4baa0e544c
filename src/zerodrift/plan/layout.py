"""Where everything lies: units from names, segments from columns, offsets from sizes. Pure arithmetic.

A *unit* is what is gathered together. Unless the config names them, units are the transformer blocks,
found by name: the outermost numbered children that hold modules of their own (`model.layers.7`), or the
children of one that has no forward. The root takes the rest, and parameters that are tied across units.

A *segment* is cut into equal slices, one per rank. Where the cuts fall is a matter of packing alone, so an
optimizer that needs whole parameters or whole matrices gets them by where its segment's rows lie; whoever
gathers, reduces or updates sees a flat buffer as any other. What it costs is padding: every slice is as
long as the fullest.

Invariant: every parameter is in exactly one unit, and offsets are multiples of BLOCK.
"""

from __future__ import annotations

import fnmatch
import heapq
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from zerodrift.dtypes import BLOCK
from zerodrift.errors import ConfigError, Problems, did_you_mean
from zerodrift.model.spec import ModelSpec, ParameterSpec
from zerodrift.plan.stages import even_by_cost, products
from zerodrift.policy.nouns import Columns, Placement

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
    """Indices into `ModelSpec.parameters`."""
    stage: int
    copies: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Of parameters that other pieces of a pipeline use too: which."""
    products: int = 0
    """What a token costs in its forward, in a pipeline."""


def find_units(
    model: ModelSpec, patterns: Sequence[str], stages: int, split: Literal["layers", "cost"] = "layers"
) -> list[Members]:
    """The units of a model in order of execution: per piece of a pipeline its root, then its blocks."""
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
    stage_of = _stages(list(blocks), stages)
    costs = {name: sum(products(model.parameters[i]) for i in block) for name, block in blocks.items()}
    ends = [i for i in rest if _root_stage(i, first_block, stages) or len(model.parameters[i].names) > 1]
    after = sum(products(model.parameters[i]) for i in ends)
    if split == "cost" and stages > 1:
        sizes = even_by_cost(list(costs.values()), stages, after)
        stage_of = dict(zip(blocks, (s for s, size in enumerate(sizes) for _ in range(size)), strict=True))
    units = []
    for stage in range(stages):
        root = [i for i in rest if _root_stage(i, first_block, stages) == stage]
        if root or stage == 0:
            copies = {i: _copies(model.parameters[i], stage, stages, block_of, stage_of) for i in root}
            copied = {i: blocks_of for i, blocks_of in copies.items() if blocks_of}
            units.append(Members("", tuple(root), stage, copied))
        here = [name for name in blocks if stage_of[name] == stage]
        units += [Members(name, tuple(blocks[name]), stage, products=costs[name]) for name in here]
    if stages == 1:
        return [replace(unit, products=0) for unit in units]
    # The last unit carries what comes behind the blocks too: of a tied head, whose root is elsewhere.
    return [*units[:-1], replace(units[-1], products=units[-1].products + after)]


def _copies(
    parameter: ParameterSpec, home: int, stages: int, block_of: BlockOf, stage_of: Mapping[str, int]
) -> tuple[int, ...]:
    """The other pieces that use a parameter by another of its names. A name outside of the blocks that is
    not the first one belongs to what comes after the blocks: the head that is tied to an embedding."""
    others = {stage_of.get(block_of(name), stages - 1) for name in parameter.names[1:]}
    return tuple(sorted(others - {home}))


def _root_stage(index: int, first_block: int, stages: int) -> int:
    """Embeddings come before the blocks and belong to the first stage; norm and head to the last."""
    return 0 if index < first_block else stages - 1


def _stages(blocks: list[str], stages: int) -> dict[str, int]:
    """Blocks over pipeline stages, contiguous and even by count."""
    if stages > max(1, len(blocks)):
        raise ConfigError(
            "pipeline.stages",
            f"must not exceed the number of blocks, {len(blocks)}",
            got=stages,
            do="Use fewer stages, or name finer units in `sharding.units`.",
        )
    return {name: number * stages // len(blocks) for number, name in enumerate(blocks)}


def _by_number(model: ModelSpec) -> BlockOf:
    """Blocks are the outermost numbered modules that hold modules of their own. One that has no forward, such
    as a list in a list, is never called: then its children are blocks."""
    holders: set[str] = set()
    for parameter in model.parameters:
        for name in parameter.names:
            holders.update(prefix for prefix, depth in _numbered(name) if depth >= 2)

    def block_of(name: str) -> str:
        block = next((prefix for prefix, _ in _numbered(name) if prefix in holders), "")
        if not block:
            return ""
        inside = [path for path in reversed(_ancestors(name)) if path.startswith(block)]
        return next((path for path in inside if path not in model.containers), "")

    return block_of


def _numbered(name: str) -> list[tuple[str, int]]:
    """(prefix that ends in a number, components after it), outermost first."""
    parts = name.split(".")
    return [
        (".".join(parts[: place + 1]), len(parts) - place - 1)
        for place, part in enumerate(parts[:-1])
        if part.isdecimal()
    ]


def _by_pattern(model: ModelSpec, patterns: Sequence[str]) -> BlockOf:
    """Blocks are the modules that a pattern names; the innermost wins."""
    compiled = [re.compile(_module_glob(pattern)) for pattern in patterns]
    paths = {path for p in model.parameters for name in p.names for path in _ancestors(name)}
    chosen = {path for path in paths if any(regex.match(path) for regex in compiled)}
    problems = Problems()
    for number, (pattern, regex) in enumerate(zip(patterns, compiled, strict=True)):
        if not any(regex.match(path) for path in paths):
            shapes = sorted({re.sub(r"\d+", "*", path) for path in paths})
            hint = did_you_mean(pattern, shapes) or f"Modules here: {', '.join(shapes[:4])}."
            problems.add(
                f"sharding.units[{number}]",
                f"must match a module of {model.source}",
                got=f"no match for {pattern!r}",
                do=hint,
            )
    problems.raise_as(ConfigError)

    def block_of(name: str) -> str:
        return next((path for path in _ancestors(name) if path in chosen), "")

    return block_of


def _ancestors(name: str) -> list[str]:
    """Module paths that hold a parameter, innermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _module_glob(pattern: str) -> str:
    """A glob on module paths in which `*` stays within one component, so `layers.*` means the layers."""
    out = []
    for part in pattern.split("."):
        piece = fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")
        out.append(piece.replace(".*", "[^.]*"))
    return r"(?s:" + r"\.".join(out) + r")\Z"


# --- segments ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packed:
    """One segment's arithmetic."""

    offsets: tuple[int, ...]
    numel: int
    padded: int


def group(parameters: Sequence[int], columns: Sequence[Columns]) -> list[list[int]]:
    """Parameters of a unit by what a segment must share. A stack that is cut between its matrices is a
    segment of its own, because its matrices set the length of a slice."""
    groups: dict[object, list[int]] = {}
    for index in parameters:
        update = columns[index].update
        alone = index if update is not None and update.placement == "matrices" else None
        groups.setdefault((columns[index].layout, alone), []).append(index)
    return list(groups.values())


def pack(parameters: Sequence[ParameterSpec], slices: int, placement: Placement = "sliced") -> Packed:
    """Where the parameters of a segment lie, for equal slices of whole blocks."""
    if placement == "whole" and slices > 1:
        return _pack_whole(parameters, slices)
    if placement == "matrices" and slices > 1:
        return _pack_stack(parameters[0], slices)
    return _pack_in_order(parameters, slices)


def _pack_in_order(parameters: Sequence[ParameterSpec], slices: int) -> Packed:
    """One after the other, each start aligned, the whole a multiple of `slices` blocks."""
    offsets, end, numel = [], 0, 0
    for parameter in parameters:
        offsets.append(end)
        numel += parameter.numel
        end = round_up(end + parameter.numel, BLOCK)
    return Packed(tuple(offsets), numel, round_up(end, BLOCK * slices))


def _pack_whole(parameters: Sequence[ParameterSpec], slices: int) -> Packed:
    """No parameter across the end of a slice: longest first, each into the slice that has the least so far,
    the first of those. At worst a third longer than the best packing, and the same on every rank."""
    lengths = [round_up(parameter.numel, BLOCK) for parameter in parameters]
    filled = [(0, number) for number in range(min(slices, len(parameters)))]  # more would stay empty
    places: list[tuple[int, int]] = [(0, 0)] * len(parameters)
    for index in sorted(range(len(parameters)), key=lambda index: -lengths[index]):
        length, number = filled[0]
        places[index] = (number, length)
        heapq.heapreplace(filled, (length + lengths[index], number))
    size = max(length for length, _ in filled)
    offsets = tuple(number * size + start for number, start in places)
    return Packed(offsets, sum(parameter.numel for parameter in parameters), size * slices)


def _pack_stack(parameter: ParameterSpec, slices: int) -> Packed:
    """A stack of matrices over slices that end between two of them, and between two blocks."""
    matrix = math.prod(parameter.shape[-2:])
    if matrix == 0:
        return Packed((0,), 0, 0)
    step = BLOCK // math.gcd(matrix, BLOCK)  # matrices that fill whole blocks
    size = round_up(-(-parameter.numel // (matrix * slices)), step) * matrix
    return Packed((0,), parameter.numel, size * slices)
