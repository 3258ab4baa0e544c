"""Which tests `make quick` and `make test` run, of all that there are.

A cell is one set of values of a parametrised test. `covering` chooses cells that hold, between them, every
value, or every two values, that any of them holds; which ones depends on nothing but the test.

- Quick are all units, and one cell of each product of the numeric core.
- Of a test that is marked `cells(2)`, the cells whose values others hold two by two are slow; of `cells(1)`,
  those whose values others hold one by one.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

QUICK: Mapping[str, int] = {
    "tests/unit/": 1,
    "tests/device/test_suite.py": 0,
    "tests/numerics/": 0,
    "tests/ranks/test_collectives.py": 0,
    "tests/ranks/test_dropin.py": 0,
    "tests/ranks/test_mesh.py": 0,
    "tests/ranks/test_pipelines.py": 0,
}
"""Folder -> how many values of a product must meet in a chosen cell; 0 chooses one cell."""

Cell = Mapping[str, str]
"""A value of each factor."""


def has_quick(path: Path) -> bool:
    """Return whether a file may hold quick tests, or a folder such files."""
    return any(path.is_relative_to(ROOT / each) or (ROOT / each).is_relative_to(path) for each in QUICK)


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark each test `quick`, or `slow` where other cells hold its values."""
    products: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and not _has(item, "slow"):
            products[item.nodeid.partition("[")[0]].append(item)
    for name, tests in products.items():
        for strength in (1, 2):
            product = [test for test in tests if _strength(test) == strength]
            chosen = _chosen(product, strength, name)
            for test in product:
                if test not in chosen:
                    test.add_marker("slow")
        patient = [test for test in tests if not _has(test, "second", "long", "slow")]
        for place, strength in QUICK.items():
            if name.startswith(place):
                for test in _chosen(patient, strength, name):
                    test.add_marker("quick")


def _has(item: pytest.Item, *names: str) -> bool:
    return any(map(item.get_closest_marker, names))


def _strength(item: pytest.Item) -> int:
    marker = item.get_closest_marker("cells")
    return marker.args[0] if marker else 0


def _chosen(tests: Sequence[pytest.Function], strength: int, seed: str) -> list[pytest.Function]:
    return [tests[number] for number in covering([factors(test) for test in tests], strength, seed)]


def factors(item: pytest.Function) -> Cell:
    """Return an item's values, with those of a tuple one by one."""
    callspec = getattr(item, "callspec", None)
    return dict(_factors(callspec.params)) if callspec else {}


def _factors(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, tuple):
            yield from _factors({f"{name}.{number}": part for number, part in enumerate(value)})
        else:
            yield name, repr(value)


def covering(cells: Sequence[Cell], strength: int, seed: str) -> list[int]:
    """Choose cells that hold every combination of `strength` values that any cell holds; for 0, one cell.

    Greedy: first what brings most that no other has brought. `seed` is the order among equals.
    """
    order = sorted(range(len(cells)), key=lambda number: zlib.crc32(f"{seed} {number}".encode()))
    if not strength:
        return order[:1]
    wanted = [set(itertools.combinations(sorted(cell.items()), min(strength, len(cell)))) for cell in cells]
    chosen = []
    held: set[tuple[tuple[str, str], ...]] = set()
    # What a cell would bring only becomes less, so one pass for each number is the whole of it.
    for least in range(max(map(len, wanted), default=0), 0, -1):
        for number in order:
            if len(wanted[number] - held) >= least:
                chosen.append(number)
                held |= wanted[number]
    return sorted(chosen)
