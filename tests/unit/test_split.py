"""Splitting fp32 into bf16 and 16 more bits is lossless for every pattern, and rounds as documented."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from zerodrift.optim.rounding import join, round_away, split

CHUNK = 1 << 16
"""Bit patterns at a time: few enough to stay in a cache."""


def patterns(upper: int) -> Tensor:
    """Return all fp32 values with these 16 upper bits."""
    first = (upper << 16) - (1 << 32 if upper >= 1 << 15 else 0)
    return (torch.arange(CHUNK, dtype=torch.int32) + first).view(torch.float32)


def assert_exact(values: Tensor) -> None:
    high, low = split(values)
    back = join(high, low)
    nan = values.isnan()
    same = values.view(torch.int32) == back.view(torch.int32)
    assert (same | nan).all()
    if nan.any():
        assert (high.view(torch.int16)[nan] == 0x7FC0).all() and (low[nan] == 0).all()
        assert back[nan].isnan().all()


def assert_rounded(values: Tensor) -> None:
    """Check that `high` is torch's own rounding, except for exact ties, which move away from zero."""
    high = split(values)[0].view(torch.int16)
    bits = values.view(torch.int32)
    expected = values.bfloat16().view(torch.int16)
    tie = torch.arange(0x8000, values.numel(), CHUNK)
    expected[tie] = ((bits[tie] >> 16) + 1).to(torch.int16)
    assert ((high == expected) | values.isnan()).all()


def boundaries() -> Iterator[int]:
    """Yield the upper bits around every exponent, of both signs, and all of the subnormals and specials."""
    for sign in (0, 1 << 15):
        for exponent in range(256):
            for step in (-2, -1, 0, 1, 2, 63, 64):
                yield (sign + (exponent << 7) + step) % (1 << 16)


def test_every_exponent_boundary_is_exact_and_rounded() -> None:
    for number, upper in enumerate(sorted(set(boundaries()))[::8]):
        assert_exact(patterns(upper))
        if number % 2 == 0:
            assert_rounded(patterns(upper))


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_all_patterns_are_exact_and_rounded() -> None:
    for upper in range(1 << 16):
        values = patterns(upper)
        assert_exact(values)
        assert_rounded(values)


def test_special_values() -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, largest, -largest, 2.0**-149, -(2.0**-149)])
    assert_exact(values)
    high, low = split(values)
    assert high.view(torch.int16)[:2].tolist() == [0, -(1 << 15)] and low[:4].tolist() == [0, 0, 0, 0]
    # The largest finite values show as infinity, and are still there.
    assert high[4:6].tolist() == [torch.inf, -torch.inf] and low[4:6].tolist() == [-1, -1]


def test_results_go_into_given_tensors() -> None:
    values = torch.randn(1000)
    high, low = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000, dtype=torch.int16)
    assert split(values, high, low) == (high, low)
    assert torch.equal(join(high, low), values)
    assert torch.equal(round_away(values), high)
