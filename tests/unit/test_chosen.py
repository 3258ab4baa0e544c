"""The chosen tests cover the values that they must cover, and every machine chooses the same."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.chosen import ROOT, Cell, covering, factors, has_quick

PRODUCT = [
    dict(zip(("stage", "mode", "world"), values, strict=True))
    for values in itertools.product("0123", ("fp32", "bf16", "fp16"), "124")
]


def holds(cells: list[Cell], strength: int) -> set[tuple[tuple[str, str], ...]]:
    return {pair for cell in cells for pair in itertools.combinations(sorted(cell.items()), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (3, 36)])
def test_every_combination_is_held_by_few_cells(strength: int, most: int) -> None:
    chosen = [PRODUCT[number] for number in covering(PRODUCT, strength, "a test")]
    assert holds(chosen, strength) == holds(PRODUCT, strength)
    assert len(chosen) <= most
    ragged = [*random.Random(0).sample(PRODUCT, 15), {"stage": "0"}, {}]
    chosen = [ragged[number] for number in covering(ragged, strength, "a test")]
    assert holds(chosen, strength) == holds(ragged, strength)
    assert {"stage": "0"} in chosen or strength == 1


def test_one_cell_is_any_but_always_the_same() -> None:
    chosen = {seed: covering(PRODUCT, 0, seed) for seed in map(str, range(50))}
    assert all(len(numbers) == 1 for numbers in chosen.values())
    assert len({number for (number,) in chosen.values()}) > 10
    assert chosen == {seed: covering(PRODUCT, 0, seed) for seed in chosen}


@pytest.mark.parametrize(
    ("path", "has"),
    [
        *(("tests", True), ("tests/unit/test_chosen.py", True), ("tests/ranks", True), ("tests/e2e", False)),
        *(("tests/ranks/test_mesh.py", True), ("tests/ranks/test_values.py", False)),
    ],
)
def test_files_without_quick_tests_are_not_imported(path: str, has: bool) -> None:
    assert has_quick(ROOT / path) is has


@pytest.mark.parametrize("pair", [("one", 2)])
@pytest.mark.parametrize("alone", [None])
def test_a_tuple_is_several_factors(
    request: pytest.FixtureRequest, pair: tuple[str, int], alone: None
) -> None:
    assert isinstance(request.node, pytest.Function)
    assert factors(request.node) == {"pair.0": "'one'", "pair.1": "2", "alone": "None"}
    assert request.node.get_closest_marker("quick"), "a unit is always quick"
