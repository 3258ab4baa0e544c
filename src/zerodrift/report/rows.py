"""Groups the rows of a plan into the lines of a table: pure, and fast for tens of thousands of rows.

Rows whose names differ only in numbers, and that agree in shape and in every column and reason, become
one line: `model.layers.*.mlp.down_proj.weight`, 32 times. A `*` stands for every number that occurs at
that place in the model; anything less is written out, `model.layers.0-2.mlp.down_proj.weight`. What
cannot be said by one pattern becomes several. `terminal` and `page` draw the lines.

Invariant: the patterns of the lines, expanded, are the rows of the plan, each exactly once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zerodrift.plan.boundaries import enclosing_modules
from zerodrift.plan.table import Boundary, Plan, Row
from zerodrift.policy.nouns import Columns

Numbers = tuple[int, ...]
"""The numbers of one name, left to right: `model.layers.3.mlp.experts.17.up_proj.weight` has (3, 17)."""

Template = tuple[str | None, ...]
"""The components of a name, None for a number. A component may itself be a star."""

Box = tuple[frozenset[int], ...]
"""A set per place; stands for every combination."""


@dataclass(frozen=True, slots=True)
class ColumnSet:
    """Columns that rows have in common, reasons included."""

    letter: str
    """`A`, `B`, ... in the order of first appearance in the plan."""
    columns: Columns
    tensors: int
    """Rows of the plan that have them."""
    numel: int
    """Elements of those rows."""


@dataclass(frozen=True, slots=True)
class Line:
    """What one line of the table stands for."""

    pattern: str
    also: tuple[str, ...]
    """Patterns of the other names, where parameters are tied."""
    shape: tuple[int, ...]
    """Of each row."""
    numel: int
    """Of all rows together."""
    rows: tuple[int, ...]
    """Indices into `Plan.rows`, ascending."""
    set: int
    """Index into `Table.sets`."""

    @property
    def count(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Casts:
    """Boundaries that differ in nothing but the numbers of their paths."""

    pattern: str
    boundaries: tuple[Boundary, ...]

    @property
    def first(self) -> Boundary:
        return self.boundaries[0]


@dataclass(frozen=True, slots=True)
class Table:
    """The lines, in the order of their first rows, and the column sets that they point to."""

    sets: tuple[ColumnSet, ...]
    """Of the whole plan, also where only some rows are shown: a letter means the same in every view."""
    lines: tuple[Line, ...]
    casts: tuple[Casts, ...]
    """The boundaries around the parameters that are shown."""

    def shown(self) -> tuple[ColumnSet, ...]:
        """The sets that a line points to."""
        used = {line.set for line in self.lines}
        return tuple(item for index, item in enumerate(self.sets) if index in used)

    def members(self, of: ColumnSet) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if self.sets[line.set] is of)


def grouped(plan: Plan) -> Table:
    """The whole plan, a line per pattern."""
    numbers = _set_numbers(plan.rows)
    lines, universe = _group(plan.rows, numbers)
    return Table(_sets(plan.rows, numbers), lines, _casts(plan.boundaries, universe))


def single(plan: Plan, chosen: Sequence[int]) -> Table:
    """Some rows of the plan, a line each."""
    numbers = _set_numbers(plan.rows)
    rows = [(index, plan.rows[index]) for index in chosen]
    lines = tuple(
        Line(row.name, row.names[1:], row.whole_shape, row.whole_numel, (index,), numbers[index])
        for index, row in rows
    )
    near = {path for _, row in rows for name in row.names for path in enclosing_modules(name)}
    casts = tuple(Casts(boundary.path, (boundary,)) for boundary in plan.boundaries if boundary.path in near)
    return Table(_sets(plan.rows, numbers), lines, casts)


def template(name: str) -> str:
    """The name with a `*` for every component that is a number."""
    return ".".join("*" if part is None else part for part in _split(name)[0])


# --- column sets --------------------------------------------------------------------------------------


def _set_numbers(rows: Sequence[Row]) -> list[int]:
    """The set of each row. Rows share `Columns` objects, so equality is only asked once per object."""
    by_object: dict[int, int] = {}
    by_value: dict[tuple[object, ...], int] = {}
    numbers = []
    for row in rows:
        key = id(row.columns)
        if key not in by_object:
            by_object[key] = by_value.setdefault(_agreement(row.columns), len(by_value))
        numbers.append(by_object[key])
    return numbers


def _agreement(columns: Columns) -> tuple[object, ...]:
    """What rows of one set have in common. `output` only means something where a parameter is pinned."""
    output = columns.output if columns.pinned else None
    return (columns.layout, columns.export, columns.pinned, output, columns.why)


def _sets(rows: Sequence[Row], numbers: Sequence[int]) -> tuple[ColumnSet, ...]:
    first: dict[int, Columns] = {}
    tensors: dict[int, int] = defaultdict(int)
    numel: dict[int, int] = defaultdict(int)
    for row, number in zip(rows, numbers, strict=True):
        first.setdefault(number, row.columns)
        tensors[number] += 1
        numel[number] += row.whole_numel
    return tuple(
        ColumnSet(letter(number), columns, tensors[number], numel[number])
        for number, columns in first.items()
    )


def letter(number: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("A") + digit) + text
    return text


# --- patterns -----------------------------------------------------------------------------------------


def _split(name: str) -> tuple[Template, Numbers]:
    """The template of a name, and the numbers that it leaves out."""
    parts: list[str | None] = []
    numbers: list[int] = []
    for part in name.split("."):
        # "007" is not how a number is written, and could not be told from "7" again.
        if len(part) < 19 and part.isdecimal() and part.isascii() and str(int(part)) == part:
            numbers.append(int(part))
            parts.append(None)
        else:
            parts.append(part)
    return tuple(parts), tuple(numbers)


def _group(
    rows: Sequence[Row], set_numbers: Sequence[int]
) -> tuple[tuple[Line, ...], dict[Template, set[int]]]:
    """The lines, and the numbers that occur at each place of a name."""
    families: dict[tuple[tuple[Template, ...], tuple[int, ...], int], dict[Numbers, int]] = defaultdict(dict)
    occurring: dict[Template, set[Numbers]] = defaultdict(set)
    for index, row in enumerate(rows):
        splits = [_split(name) for name in row.names]
        for text, numbers in splits:
            occurring[text].add(numbers)
        texts = tuple(text for text, _ in splits)
        families[texts, row.whole_shape, set_numbers[index]][splits[0][1]] = index
    universe = _universe(occurring)
    lines = []
    for (texts, shape, number), members_of in families.items():
        for box in _boxes(list(members_of)):
            members = tuple(sorted(members_of[numbers] for numbers in product(*box)))
            pattern = _pattern(texts[0], box, universe)
            also = _also([rows[index] for index in members], universe)
            numel = math.prod(shape) * len(members)
            lines.append(Line(pattern, also, shape, numel, members, number))
    return tuple(sorted(lines, key=lambda line: line.rows[0])), universe


def _casts(boundaries: Iterable[Boundary], universe: dict[Template, set[int]]) -> tuple[Casts, ...]:
    """A line per pattern of paths, in the order of their first boundaries."""
    listed = list(boundaries)
    names = [(boundary.path, replace(boundary, path="")) for boundary in listed]
    patterns = _folded(names, universe)
    return tuple(Casts(pattern, tuple(listed[i] for i in indices)) for pattern, indices in patterns)


def folded(names: Sequence[tuple[str, Hashable]]) -> list[tuple[str, tuple[int, ...]]]:
    """Patterns of (name, what names of one pattern must agree in), and which of them each stands for, in the
    order of the first."""
    occurring: dict[Template, set[Numbers]] = defaultdict(set)
    for name, _ in names:
        text, numbers = _split(name)
        occurring[text].add(numbers)
    return _folded(names, _universe(occurring))


def _folded(
    names: Sequence[tuple[str, Hashable]], universe: dict[Template, set[int]]
) -> list[tuple[str, tuple[int, ...]]]:
    families: dict[tuple[Template, Hashable], dict[Numbers, int]] = defaultdict(dict)
    for index, (name, alike) in enumerate(names):
        text, numbers = _split(name)
        families[text, alike][numbers] = index
    patterns = []
    for (text, _), members in families.items():
        for box in _boxes(list(members)):
            indices = tuple(sorted(members[numbers] for numbers in product(*box)))
            patterns.append((indices, _pattern(text, box, universe)))
    return [(pattern, indices) for indices, pattern in sorted(patterns)]


def _universe(occurring: dict[Template, set[Numbers]]) -> dict[Template, set[int]]:
    """For every place, named by the template up to it: all numbers that occur there."""
    universe: dict[Template, set[int]] = defaultdict(set)
    for text, tuples in occurring.items():
        for place, prefix in enumerate(_prefixes(text)):
            universe[prefix].update(numbers[place] for numbers in tuples)
    return universe


def _prefixes(text: Template) -> list[Template]:
    """The template up to each of its numbers."""
    return [text[:index] for index, part in enumerate(text) if part is None]


def _boxes(tuples: Sequence[Numbers]) -> list[Box]:
    """The tuples as few boxes: those that agree in what follows share their first number's set."""
    if not tuples[0]:
        return [()]
    rest: dict[int, list[Numbers]] = defaultdict(list)
    for first, *others in tuples:
        rest[first].append(tuple(others))
    alike: dict[tuple[Box, ...], list[int]] = defaultdict(list)
    for first, others_of in rest.items():
        alike[tuple(_boxes(others_of))].append(first)
    return [(frozenset(firsts), *box) for boxes, firsts in alike.items() for box in boxes]


def _pattern(text: Template, box: Box, universe: dict[Template, set[int]]) -> str:
    """The template with stars where they are true, and numbers elsewhere."""
    places = iter(zip(box, _prefixes(text), strict=True))
    parts = []
    for part in text:
        if part is None:
            numbers, prefix = next(places)
            every = len(numbers) > 1 and len(numbers) == len(universe[prefix])
            part = "*" if every else ranges(numbers)
        parts.append(part)
    return ".".join(parts)


def _also(rows: Sequence[Row], universe: dict[Template, set[int]]) -> tuple[str, ...]:
    """The other names of tied rows, as patterns."""
    numbers_of: dict[Template, list[Numbers]] = defaultdict(list)
    for row in rows:
        for name in row.names[1:]:
            text, numbers = _split(name)
            numbers_of[text].append(numbers)
    return tuple(
        _pattern(text, box, universe) for text, numbers in numbers_of.items() for box in _boxes(numbers)
    )


def ranges(numbers: Iterable[int]) -> str:
    """`0-2`, `0,5-7`, and `0-34:2` for every second number."""
    ordered = sorted(numbers)
    texts = []
    start = 0
    while start < len(ordered):
        stop, step = _run(ordered, start)
        low, high = ordered[start], ordered[stop - 1]
        if stop - start == 1:
            texts.append(str(low))
        elif step == 1:
            texts.append(f"{low}-{high}")
        else:
            texts.append(f"{low}-{high}:{step}")
        start = stop
    return ",".join(texts)


def _run(ordered: Sequence[int], start: int) -> tuple[int, int]:
    """The end of the evenly spaced run that starts here, and its step; two numbers only run with step 1."""
    if start + 1 == len(ordered):
        return start + 1, 1
    step = ordered[start + 1] - ordered[start]
    stop = start + 2
    while stop < len(ordered) and ordered[stop] - ordered[stop - 1] == step:
        stop += 1
    if step > 1 and stop - start < 3:
        return start + 1, 1
    return stop, step
