"""Which tests `make quick` runs: all units, and one cell of each product of the numeric core.

A cell is one set of values of a parametrised test. `covering` chooses cells that hold, between them, every
value, or every two values, that any of them holds; which ones depends on nothing but the test.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

QUICK: Mapping[str, int] = {
    "tests/unit/": 1,
    "tests/numerics/": 0,
    "tests/ranks/test_collectives.py": 0,
    "tests/ranks/test_dropin.py": 0,
    "tests/ranks/test_fsdp2.py": 0,
    "tests/ranks/test_mesh.py": 0,
    "tests/ranks/test_observe.py": 0,
    "tests/ranks/test_pipelines.py": 0,
    "tests/ranks/test_ways.py": 0,
}
"""How much of a product is run, by where it is: 0 is one cell, 1 each value once."""

NOT_QUICK = ("slow", "gpu", "long")

Cell = Mapping[str, str]
"""A value of each factor."""


def mark_quick(items: Iterable[pytest.Item]) -> None:
    """Give the quick ones their mark."""
    products: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and not any(map(item.get_closest_marker, NOT_QUICK)):
            products[item.nodeid.partition("[")[0]].append(item)
    for name, cells in products.items():
        for place, strength in QUICK.items():
            if name.startswith(place):
                for number in covering([factors(item) for item in cells], strength, name):
                    cells[number].add_marker("quick")


def factors(item: pytest.Function) -> Cell:
    """What an item's values are, those of a tuple one by one."""
    callspec = getattr(item, "callspec", None)
    return dict(_factors(callspec.params)) if callspec else {}


def _factors(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, tuple):
            yield from _factors({f"{name}.{number}": part for number, part in enumerate(value)})
        else:
            yield name, repr(value)


def covering(cells: Sequence[Cell], strength: int, seed: str) -> list[int]:
    """Cells, in order, that hold every combination of `strength` values that any cell holds; for 0, one cell.

    Greedy: next comes the cell with the most combinations that are still wanted, and of several the one
    whose values were chosen least. `seed` decides where that leaves a choice.
    """
    order = sorted(range(len(cells)), key=lambda number: zlib.crc32(f"{seed} {number}".encode()))
    if not strength:
        return order[:1]
    holds = [set(itertools.combinations(sorted(cell.items()), min(strength, len(cell)))) for cell in cells]
    wanted = set().union(*holds)
    used: Counter[tuple[str, str]] = Counter()
    chosen = []
    while wanted:
        best = max(
            order,
            key=lambda number: (
                len(holds[number] & wanted),
                -sum(used[value] for value in cells[number].items()),
            ),
        )
        chosen.append(best)
        wanted -= holds[best]
        used.update(cells[best].items())
    return sorted(chosen)
