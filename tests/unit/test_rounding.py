"""Stochastic rounding is unbiased, and the same for any slice, at any stage, on any machine."""

from __future__ import annotations

import pytest
import torch

from zerodrift.kernels import block_keys, parameter_key, random_words, step_key
from zerodrift.optim.rounding import round_stochastic

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


@pytest.mark.parametrize("value", [1.0, -3.3, 1e-30, 7e20, 1.00390625 + 2**-12, 2.0**-140])
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


def test_a_decaying_moment_decays() -> None:
    """Rounded to nearest a bf16 value never falls at 0.999 a step; stochastically it does, on average."""
    steps, decay = 1000, 0.999
    keys = block_keys(KEY, 0, 8)
    nearest = torch.ones(2048, dtype=torch.bfloat16)
    drawn = nearest.clone()
    for step in range(steps):
        nearest = (nearest.float() * decay).bfloat16()
        drawn = round_stochastic(drawn.float() * decay, random_words(keys, step).flatten())
    assert (nearest == 1.0).all()
    assert drawn.float().mean().item() == pytest.approx(decay**steps, rel=0.01)
