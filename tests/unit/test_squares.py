"""Sums of squares are right, and have the same bits for any slicing and path."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from zerodrift.dtypes import BLOCK
from zerodrift.kernels import native
from zerodrift.kernels.squares import (
    DIGITS,
    add_squares,
    block_square_sums,
    digits,
    reference_square_sums,
    total,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def wild(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values over many orders of magnitude."""
    generator = torch.Generator().manual_seed(numel)
    spread = 10 ** (torch.randn(numel, generator=generator) * (1 if dtype is torch.float16 else 6))
    return (torch.randn(numel, generator=generator) * spread).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 15, 256, 257, 300, 256 * 300])
def test_both_paths_have_the_same_bits(dtype: torch.dtype, numel: int) -> None:
    flat = wild(numel, dtype)
    sums = block_square_sums(flat)
    assert sums.dtype is torch.float64 and sums.numel() == -(-numel // BLOCK)
    assert torch.equal(sums, reference_square_sums(flat))
    offset = wild(numel + 3, dtype)[3:]
    assert torch.equal(block_square_sums(offset), reference_square_sums(offset))


def test_a_block_sum_is_right() -> None:
    flat = wild(BLOCK)
    exact = sum(Fraction(value) ** 2 for value in flat.tolist())
    assert block_square_sums(flat).item() == pytest.approx(float(exact), rel=1e-15)


def test_totals_are_exact_and_have_no_order() -> None:
    sums = block_square_sums(wild(BLOCK * 500))
    exact = float(sum(Fraction(value) for value in sums.tolist()))
    assert total(digits(sums)) == exact
    assert total(digits(sums.flip(0))) == exact
    for cut in (1, 13, 250, 499):
        parts = [digits(sums[:cut]), digits(sums[cut:])]
        assert total(parts[0] + parts[1]) == exact
        assert total(digits(sums[cut:], out=digits(sums[:cut]))) == exact
    for ranks in (2, 3, 8, 60):  # an integer all-reduce adds the digits of slices
        parts = [digits(part) for part in sums.chunk(ranks)]
        assert total(torch.stack(parts).sum(0)) == exact
        assert all(part[:DIGITS].max() < 1 << 34 for part in parts)


def test_both_paths_have_the_same_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = torch.cat([block_square_sums(wild(BLOCK * 100)), torch.tensor([0.0, torch.inf, torch.nan])])
    compiled = digits(sums)
    monkeypatch.setattr(native, "library", lambda: None)
    assert torch.equal(digits(sums), compiled)
    assert compiled[DIGITS] == 2 and total(compiled) == math.inf


@pytest.mark.parametrize("value", [2.0**-149, 1e-38, 1.0, torch.finfo(torch.float32).max])
def test_the_range_of_fp32_fits(value: float) -> None:
    flat = torch.full((BLOCK * 3,), value)
    square = Fraction(flat[0].item()) ** 2
    assert total(digits(block_square_sums(flat))) == float(square * BLOCK * 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_element_is_seen(bad: float, dtype: torch.dtype) -> None:
    flat = wild(BLOCK * 4 + 10, dtype)
    assert digits(block_square_sums(flat))[DIGITS] == 0
    flat[BLOCK * 4 + 3] = bad
    summed = digits(block_square_sums(flat))
    assert summed[DIGITS] == 1
    assert total(summed) == math.inf


def test_many_tensors_add_up_in_one_call() -> None:
    flats = [wild(count) for count in (0, 5, BLOCK, BLOCK * 7 + 3)]
    together, one_by_one = digits(torch.empty(0, dtype=torch.float64)), digits(block_square_sums(flats[0]))
    add_squares(flats, together)
    for flat in flats:
        digits(block_square_sums(flat), one_by_one)
    assert torch.equal(together, one_by_one) and together.any()
    add_squares([], together)
    assert torch.equal(together, one_by_one)


def test_threads_do_not_change_bits() -> None:
    flat = wild(BLOCK * 600)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(block_square_sums(flat))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
