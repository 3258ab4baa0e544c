"""Lines of the table of a plan, grouped from tens of thousands of rows.

Rows whose names differ only in numbers, and that agree in shape and in every column and reason, become
one line: `model.layers.*.mlp.down_proj.weight`, 32 times. A `*` stands for all numbers that occur at that
place in the model. Other sets of numbers are written out: `model.layers.0-2.mlp.down_proj.weight`. Rows that
one pattern cannot express become several lines. `terminal` and `plan_html` draw the lines.

Invariant: the expanded patterns of all lines name every row of the plan exactly once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zerodrift.plan import Boundary, Plan, Row, enclosing_modules
from zerodrift.policy import Columns

Numbers = tuple[int, ...]
"""Numbers of one name, left to right: `model.layers.3.mlp.experts.17.up_proj.weight` has (3, 17)."""

Template = tuple[str | None, ...]
"""Components of a name, with None for a number. A component may itself be a star."""

Box = tuple[frozenset[int], ...]  # one set of numbers per place, for all their combinations


@dataclass(frozen=True, slots=True)
class ColumnSet:
    """Columns, including their reasons, that several rows share."""

    letter: str
    """`A`, `B`, ... in the order of the plan."""
    columns: Columns
    tensors: int  # number of rows in the set
    numel: int  # elements of all rows in the set


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table, for rows whose names match a pattern."""

    pattern: str
    also: tuple[str, ...]  # patterns of the other names of tied parameters
    shape: tuple[int, ...]  # shape of each row
    numel: int  # elements of all rows together
    rows: tuple[int, ...]  # indices into `Plan.rows`, ascending
    set: int  # index into `Table.sets`

    @property
    def count(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Table:
    """Lines in the order of their first rows, and the column sets that they refer to."""

    sets: tuple[ColumnSet, ...]
    """Column sets of the whole plan, so that a letter means the same in every view."""
    lines: tuple[Line, ...]
    boundaries: tuple[tuple[str, tuple[Boundary, ...]], ...]
    """Pattern of the paths, and the boundaries that differ in their numbers alone."""

    def shown(self) -> tuple[ColumnSet, ...]:
        """Return the column sets that a line refers to."""
        used = {line.set for line in self.lines}
        return tuple(item for index, item in enumerate(self.sets) if index in used)

    def members(self, of: ColumnSet) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if self.sets[line.set] is of)


def group_rows(plan: Plan) -> Table:
    """Group all rows of a plan into one line per pattern."""
    numbers, rows = _set_numbers(plan.rows), plan.rows
    universe = _universe(name for row in rows for name in row.names)
    names = [
        (row.name, (tuple(_split(name)[0] for name in row.names[1:]), row.whole_shape, number))
        for row, number in zip(rows, numbers, strict=True)
    ]
    lines = []
    for pattern, members in _fold(names, universe):
        first, others = rows[members[0]], [(name, 0) for index in members for name in rows[index].names[1:]]
        also, numel = tuple(text for text, _ in _fold(others, universe)), first.whole_numel * len(members)
        lines.append(Line(pattern, also, first.whole_shape, numel, members, numbers[members[0]]))
    alike = _fold([(each.path, replace(each, path="")) for each in plan.boundaries], universe)
    boundaries = [(path, tuple(plan.boundaries[index] for index in found)) for path, found in alike]
    return Table(_sets(rows, numbers), tuple(lines), tuple(boundaries))


def list_rows(plan: Plan, chosen: Sequence[int]) -> Table:
    numbers = _set_numbers(plan.rows)
    rows = [(index, plan.rows[index]) for index in chosen]
    lines = tuple(
        Line(row.name, row.names[1:], row.whole_shape, row.whole_numel, (index,), numbers[index])
        for index, row in rows
    )
    near = {path for _, row in rows for name in row.names for path in enclosing_modules(name)}
    around = tuple((each.path, (each,)) for each in plan.boundaries if each.path in near)
    return Table(_sets(plan.rows, numbers), lines, around)


def template(name: str) -> str:
    """Replace every component of a name that is a number by `*`."""
    return ".".join("*" if part is None else part for part in _split(name)[0])


def _set_numbers(rows: Sequence[Row]) -> list[int]:
    """Return the set number of each row. Rows share `Columns` objects, so each object is hashed once."""
    by_value: dict[tuple[object, ...], int] = {}
    by_object: dict[int, int] = {}
    for columns in {id(row.columns): row.columns for row in rows}.values():
        output = columns.output if columns.pinned else None  # counts for pinned parameters alone
        key = (columns.layout, columns.export, columns.pinned, output, columns.why)
        by_object[id(columns)] = by_value.setdefault(key, len(by_value))
    return [by_object[id(row.columns)] for row in rows]


def _sets(rows: Sequence[Row], numbers: Sequence[int]) -> tuple[ColumnSet, ...]:
    rows_of: dict[int, list[Row]] = defaultdict(list)
    for row, number in zip(rows, numbers, strict=True):
        rows_of[number].append(row)
    return tuple(
        ColumnSet(letter(number), alike[0].columns, len(alike), sum(row.whole_numel for row in alike))
        for number, alike in rows_of.items()
    )


def letter(number: int) -> str:
    """Return the letter of a number: 0 -> A, 25 -> Z, 26 -> AA."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("A") + digit) + text
    return text


def _split(name: str) -> tuple[Template, Numbers]:
    """Split a name into its template and its numbers."""
    parts: list[str | None] = []
    numbers: list[int] = []
    for part in name.split("."):
        # "007" is no number here: as a pattern it would be the same as "7".
        if len(part) < 19 and part.isdecimal() and part.isascii() and str(int(part)) == part:
            numbers.append(int(part))
            parts.append(None)
        else:
            parts.append(part)
    return tuple(parts), tuple(numbers)


def fold_names(names: Sequence[tuple[str, Hashable]]) -> list[tuple[str, tuple[int, ...]]]:
    """Fold (name, key) pairs into patterns of names with equal keys, with the indices that each stands for.
    Patterns keep the order of their first index."""
    return _fold(names, _universe(name for name, _ in names))


def _fold(
    names: Sequence[tuple[str, Hashable]], universe: dict[Template, set[int]]
) -> list[tuple[str, tuple[int, ...]]]:
    """Fold (name, key) pairs into patterns, given all numbers that occur at each place."""
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


def _universe(names: Iterable[str]) -> dict[Template, set[int]]:
    """Collect all numbers that occur at each place. The template up to a place is its key."""
    occurring: dict[Template, set[Numbers]] = defaultdict(set)
    for text, numbers in map(_split, names):
        occurring[text].add(numbers)
    universe: dict[Template, set[int]] = defaultdict(set)
    for text, tuples in occurring.items():
        for place, prefix in enumerate(_prefixes(text)):
            universe[prefix].update(numbers[place] for numbers in tuples)
    return universe


def _prefixes(text: Template) -> list[Template]:
    """Return the template up to each of its numbers."""
    return [text[:index] for index, part in enumerate(text) if part is None]


def _boxes(tuples: Sequence[Numbers]) -> list[Box]:
    """Cover the tuples with few boxes. First numbers with the same continuations share a box."""
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
    """Return the template with `*` where all numbers of a place occur, and with ranges elsewhere."""
    places = iter(zip(box, _prefixes(text), strict=True))
    parts = []
    for part in text:
        if part is None:
            numbers, prefix = next(places)
            every = len(numbers) > 1 and len(numbers) == len(universe[prefix])
            part = "*" if every else ranges(numbers)
        parts.append(part)
    return ".".join(parts)


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: `0-2`, `0,5-7`, or `0-34:2` for every second number."""
    left = sorted(numbers)
    texts = []
    while left:
        low, step = left[0], left[1] - left[0] if len(left) > 1 else 1
        count = next((n for n, number in enumerate(left) if number != low + n * step), len(left))
        if step > 1 and count < 3:
            count = 1
        high = left[count - 1]
        run = f"{low}-{high}" if step == 1 else f"{low}-{high}:{step}"
        texts.append(str(low) if low == high else run)
        left = left[count:]
    return ",".join(texts)
