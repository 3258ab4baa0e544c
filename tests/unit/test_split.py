"""Splitting fp32 into bf16 and 16 more bits is lossless for every pattern and rounds as documented.

Stochastic rounding is unbiased, and the same for any slice, at any stage, on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from zerodrift.kernels import block_keys, parameter_key, random_words, step_key
from zerodrift.optim.rounding import join, round_stochastic, split

pytestmark = pytest.mark.usefixtures("one_thread")

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
    largest = torch.finfo(torch.float32).max
    high, low = split(torch.tensor([0.0, -0.0, largest, -largest]))
    assert high[:2].view(torch.int16).tolist() == [0, -(1 << 15)]
    # The largest finite values show as infinity, and are still there.
    assert high[2:].tolist() == [torch.inf, -torch.inf] and low.tolist() == [0, 0, -1, -1]
    for number, upper in enumerate(sorted(set(boundaries()))[::16]):
        assert_exact(patterns(upper))
        if number % 2 == 0:
            assert_rounded(patterns(upper))


@pytest.mark.slow
def test_all_patterns_are_exact_and_rounded() -> None:
    for upper in range(1 << 16):
        values = patterns(upper)
        assert_exact(values)
        assert_rounded(values)


# --- stochastic -----------------------------------------------------------------------------------------


KEY = parameter_key("layers.0.weight", seed=7)


def test_known_answers() -> None:
    """A resumed run draws the same bits only if these never change."""
    assert KEY == 0x1B556D2E2CDF37F5
    assert step_key(0) == -2152535657050944081
    assert step_key(100_000) == 3350272923970713221
    keys = block_keys(KEY, first=5, count=2)
    assert keys.tolist() == [-3822694208662872059, 8728578229168332258]
    words = random_words(keys, step=3)[:, [0, 1, 255]]
    assert words.tolist() == [[3670010043, 2393111659, 2681771384], [2794362524, 463613441, 168168540]]


def test_a_block_has_the_same_words_in_every_slicing() -> None:
    whole = random_words(block_keys(KEY, 0, 64), step=11)
    for first, count in ((0, 1), (1, 7), (8, 56), (63, 1)):
        part = random_words(block_keys(KEY, first, count), step=11)
        assert torch.equal(part, whole[first : first + count])


def test_bits_do_not_correlate() -> None:
    """No pair of bits of neighbours, halves, steps and blocks agrees more than chance allows."""
    words = random_words(block_keys(KEY, 0, 2048), step=4)
    later = random_words(block_keys(KEY, 0, 2048), step=5)
    pairs = [(words[:, 1:], words[:, :-1]), (words, later), (words[1:], words[:-1]), (words, words >> 16)]
    for one, other in pairs:
        differing = (one ^ other) & 0xFFFF
        for bit in range(16):
            share = ((differing >> bit) & 1).double().mean().item()
            # Deviation 0.5 / sqrt(520,000) = 0.0007.
            assert share == pytest.approx(0.5, abs=0.0045)


@pytest.mark.parametrize("value", [-3.3, 1.00390625 + 2**-12, 2.0**-140])
def test_rounding_is_unbiased(value: float) -> None:
    count = 256 * 2048
    values = torch.full((count,), value)
    words = random_words(block_keys(KEY, 0, 2048), step=9).flatten()
    rounded = round_stochastic(values, words).double()
    spacing = (rounded.max() - rounded.min()).item()
    error = rounded.mean().item() - values[0].double().item()
    # Up to half a spacing of deviation for each of 524,288 draws; five deviations of the mean.
    assert abs(error) <= 5 * 0.5 * spacing / count**0.5
    assert rounded.unique().numel() <= 2


def test_representable_values_infinities_and_nans_stay() -> None:
    values = torch.tensor([1.0, -2.5, 0.0, -0.0, torch.inf, -torch.inf]).repeat(256)
    words = random_words(block_keys(KEY, 0, 6), step=1).flatten()
    assert torch.equal(round_stochastic(values, words).view(torch.int16), values.bfloat16().view(torch.int16))
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert round_stochastic(nans, words[:3]).isnan().all()
