"""Sums of many parts take one call of the host, and have the bits of one addition after the other."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
import torch

from tests.host_calls import calls
from zerodrift.comm import fold as module
from zerodrift.comm.fold import Sum, fold
from zerodrift.kernels import native

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KINDS = [(FP32, FP32), (BF16, FP32), (FP16, FP32), (BF16, BF16), (FP16, FP16), (FP32, FP64), (FP64, FP64)]
"""(parts, sum)."""
COUNTS = [1, 2, 3, 4, 5, 7, 8, 13, 64, 100]
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


def one_by_one(parts: torch.Tensor, dtype: torch.dtype, order: Order) -> torch.Tensor:
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
    for (kind, total), count, numel in itertools.product(KINDS, COUNTS, (1, 255, 1500)):
        parts, how = parts_of(count, numel, kind), Sum(total, order=order)
        before, want = parts.clone(), one_by_one(parts, total, order)
        for given in (parts, list(parts)):  # one behind the other, and each somewhere
            out = torch.empty(numel, dtype=total)
            fold(out, given, how)
            assert same_bits(out, want) and torch.equal(parts, before), (kind, total, count, numel)
        fold(out, before, how, scratch=True)
        assert same_bits(out, want), (kind, total, count, numel)
        for place in range(min(count, 4) if kind is total else 0):
            held = parts.clone()
            fold(held[place], held, how)
            assert same_bits(held[place], want), f"into part {place} of {count}"


@pytest.mark.parametrize("order", ["rank", "tree"])
def test_infinities_and_what_is_no_number_stay_so(path: str, order: Order) -> None:
    for kind, total in KINDS:
        parts = parts_of(5, 8, kind)
        parts[3, 0], parts[1, 1], parts[4, 2] = float("nan"), float("inf"), float("-inf")
        parts[:2, 3] = torch.tensor([float("inf"), float("-inf")], dtype=kind)
        parts[:, 4] = -0.0
        out = torch.empty(8, dtype=total)
        fold(out, parts, Sum(total, order=order))
        want = one_by_one(parts, total, order)
        assert out[[0, 3]].isnan().all() and torch.equal(
            out[[1, 2, *range(4, 8)]], want[[1, 2, *range(4, 8)]]
        )
        assert out[4].signbit()


@pytest.mark.parametrize("order", ["rank", "tree"])
def test_as_many_calls_for_many_parts_as_for_few(path: str, order: Order) -> None:
    def counted(count: int) -> int:
        parts, out = parts_of(count, 16, FP32), torch.empty(16)
        return calls(lambda: fold(out, parts, Sum(FP32, order=order)))

    few, many = counted(8), counted(4096)
    if path == "compiled":
        assert many == few
    elif order == "tree":
        assert many <= few + 16 * 9, "the tree is 9 levels higher"
    else:
        assert many <= few + 2 * (4096 - 8), "one addition after the other"


def test_a_slice_of_what_is_wider_is_summed(path: str) -> None:
    """The rows are not contiguous."""
    wide = parts_of(9, 300, FP32)
    for order in ("rank", "tree"):
        out = torch.empty(100)
        fold(out, wide[:, 50:150], Sum(FP32, order=order))  # type: ignore[arg-type]
        assert same_bits(out, one_by_one(wide[:, 50:150], FP32, order))  # type: ignore[arg-type]
