"""Sums of squares and of many parts are right, and have the same bits for any slicing and path."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Literal

import pytest
import torch

from zerodrift.comm import fold as module
from zerodrift.comm.fold import Sum, fold
from zerodrift.dtypes import BLOCK
from zerodrift.kernels import native
from zerodrift.kernels.squares import (
    DIGITS,
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
@pytest.mark.parametrize("numel", [0, 1, 257, 256 * 30])
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


@pytest.mark.parametrize("value", [2.0**-149, torch.finfo(torch.float32).max])
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


def test_threads_do_not_change_bits(one_thread: None) -> None:
    flat, found = wild(BLOCK * 600), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(block_square_sums(flat))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# --- sums of many parts -----------------------------------------------------------------------------------


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KINDS = [(FP32, FP32), (BF16, FP32), (FP16, FP32), (BF16, BF16), (FP16, FP16), (FP32, FP64), (FP64, FP64)]
"""(parts, sum)."""
COUNTS = [1, 2, 3, 5, 8, 13, 100]
Order = Literal["rank", "tree"]


@pytest.fixture(params=["compiled", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(module, "_add_up", lambda *args, **kwargs: False)
    elif native.library() is None:
        pytest.skip("nothing compiles here")
    return str(request.param)


def parts_of(count: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return parts over many binades, so that another order shows."""
    generator = torch.Generator().manual_seed(1000 * count + numel)
    values = torch.randn(count, numel, generator=generator)
    return torch.ldexp(values, torch.randint(-6, 7, values.shape, generator=generator)).to(dtype)


def one_by_one(parts: Iterable[torch.Tensor], dtype: torch.dtype, order: str) -> torch.Tensor:
    sums = [part.to(dtype) for part in parts]
    while order == "tree" and len(sums) > 1:
        pairs = (sums[start : start + 2] for start in range(0, len(sums), 2))
        sums = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    first, *others = sums
    for other in others:
        first = first + other
    return first


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("order", ["rank", "tree"])
def test_bits_are_those_of_one_addition_after_the_other(path: str, order: Order) -> None:
    for (kind, wide), count, numel in itertools.product(KINDS, COUNTS, (1, 300)):
        parts, how = parts_of(count, numel, kind), Sum(wide, order=order)
        before, want = parts.clone(), one_by_one(parts, wide, order)
        for given in (parts, list(parts)):  # one behind the other, and each somewhere
            out = torch.empty(numel, dtype=wide)
            fold(out, given, how)
            assert same_bits(out, want) and torch.equal(parts, before), (kind, wide, count, numel)
        fold(out, before, how, scratch=True)
        assert same_bits(out, want), (kind, wide, count, numel)
        for place in range(min(count, 4) if kind is wide else 0):
            held = parts.clone()
            fold(held[place], held, how)
            assert same_bits(held[place], want), f"into part {place} of {count}"


@pytest.mark.parametrize("order", ["rank", "tree"])
def test_infinities_and_what_is_no_number_stay_so(path: str, order: Order) -> None:
    for kind, wide in KINDS:
        parts = parts_of(5, 8, kind)
        parts[3, 0], parts[1, 1], parts[4, 2] = float("nan"), float("inf"), float("-inf")
        parts[:2, 3] = torch.tensor([float("inf"), float("-inf")], dtype=kind)
        parts[:, 4] = -0.0
        out = torch.empty(8, dtype=wide)
        fold(out, parts, Sum(wide, order=order))
        want = one_by_one(parts, wide, order)
        assert out[[0, 3]].isnan().all() and torch.equal(
            out[[1, 2, *range(4, 8)]], want[[1, 2, *range(4, 8)]]
        )
        assert out[4].signbit()
