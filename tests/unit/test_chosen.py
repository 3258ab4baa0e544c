"""The chosen tests cover the values that they must cover, and every machine chooses the same."""

from __future__ import annotations

import itertools

import pytest

from tests.chosen import Cell, covering

PRODUCT = [
    dict(zip(("stage", "mode", "world"), values, strict=True))
    for values in itertools.product("0123", ("fp32", "bf16", "fp16"), "124")
]


def holds(cells: list[Cell], strength: int) -> set[tuple[tuple[str, str], ...]]:
    return {pair for cell in cells for pair in itertools.combinations(sorted(cell.items()), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (3, 36)])
def test_every_combination_is_held_by_few_cells(strength: int, most: int) -> None:
    assert covering(PRODUCT, strength, "a test") == covering(PRODUCT, strength, "a test")
    chosen = [PRODUCT[number] for number in covering(PRODUCT, strength, "a test")]
    assert holds(chosen, strength) == holds(PRODUCT, strength)
    assert len(chosen) <= most
