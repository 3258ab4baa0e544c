"""8-bit moments: exact round trips, small errors, and no bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.numerics.test_fused import generator
from zerodrift.dtypes import BLOCK
from zerodrift.kernels import block_keys, random_words
from zerodrift.optim.rounding import LARGEST_SCALE, LEAST_SCALE, LEVELS, Code, decode, encode, tables

CPU = torch.device("cpu")


def values_of(code: Code) -> Tensor:
    """Return the values of the codes that are not negative, in order."""
    return tables(CPU)[code.value, 3 * LEVELS :][: code.top + 1]


def draws(blocks: int, step: int) -> Tensor:
    return random_words(block_keys(7, 0, blocks), step).flatten() & 0xFFFF


@pytest.mark.parametrize("code", Code)
def test_the_code_is_the_dynamic_one(code: Code) -> None:
    """The code is zero, then decades up to one, each with twice as many steps as the one below."""
    values = values_of(code).double()
    assert values[0] == 0 and values[-1] == 1 and len(values) == code.top + 1
    assert (values.diff() > 0).all()
    decades = code.top.bit_length()
    for decade in range(decades):
        top = 10.0 ** (decade + 1 - decades)
        inside = values[2**decade : 2 ** (decade + 1)]
        assert inside[-1].item() == pytest.approx(top, rel=1e-6)
        assert inside.diff().tolist() == pytest.approx([0.9 * top / 2**decade] * (2**decade - 1), rel=1e-3)
    if code is Code.SIGNED:
        negative = tables(CPU)[code.value, 3 * LEVELS + 128 :]
        assert torch.equal(negative, -values_of(code))
        assert torch.signbit(negative).all()


@pytest.mark.parametrize("code", Code)
def test_what_was_read_is_written_back_as_it_was(code: Code) -> None:
    """All codes under five hundred scales, the ends among them, keep their codes and scales bit for bit."""
    codes = torch.arange(256).to(torch.uint8).repeat(500)
    scales = 2.0 ** (torch.rand(500, generator=generator()) * 221 - 95.5)
    scales[:4] = torch.tensor([LEAST_SCALE, LARGEST_SCALE, 1.0, 0.1])
    again, same = encode(code, decode(code, codes, scales))
    assert torch.equal(again, codes)
    assert torch.equal(same, scales)


@pytest.mark.parametrize("code", Code)
def test_a_value_goes_to_the_nearest_code_or_to_one_beside_it(code: Code) -> None:
    values = torch.rand(BLOCK * 200, generator=generator()) ** 6
    values.view(-1, BLOCK)[:, 0] = 1.0
    known = values_of(code)
    above = torch.searchsorted(known, values).clamp(min=1)
    low, high = known[above - 1], known[above]
    nearest = decode(code, *encode(code, values))
    # A tolerance of the arithmetic: a middle may fall to either side.
    assert ((nearest - values).abs() <= (high - low) / 2 * (1 + 1e-4)).logical_or(nearest == known[1]).all()
    drawn = decode(code, *encode(code, values, draws(200, 3)))
    near = 1e-5 * high
    assert ((drawn >= low - near) & (drawn <= high + near)).all()
    assert not torch.equal(drawn, nearest)


@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("part", [0.77, 0.011, 4e-6])
def test_rounding_at_random_keeps_the_mean(code: Code, part: float) -> None:
    blocks = 512
    values = torch.full((blocks, BLOCK), part)
    values[:, 0] = 1.0
    found = decode(code, *encode(code, values.flatten(), draws(blocks, 9))).view(blocks, BLOCK)
    assert (found[:, 0] == 1.0).all()
    rest = found[:, 1:].double()
    gap = (rest.max() - rest.min()).item()
    assert rest.unique().numel() == 2
    # Up to half a gap of deviation per draw; five deviations of the mean.
    assert abs(rest.mean().item() - part) < 5 * 0.5 * gap / rest.numel() ** 0.5


def test_a_second_moment_that_is_there_is_never_nothing() -> None:
    """A second moment of zero would make the next step a first moment over eps."""
    values = torch.tensor([1.0, 1e-7, 1e-9, 1e-20, 1e-38, 1e-45, 0.0]).repeat(BLOCK)
    for given in (None, draws(7, 2)):
        codes, _ = encode(Code.UNSIGNED, values, given)
        assert torch.equal(codes == 0, values == 0)
    tiny = torch.full((BLOCK,), 1e-9)
    tiny[0] = 1.0
    assert (encode(Code.SIGNED, tiny)[0][1:] == 0).all(), "a first moment may"


def test_values_that_are_no_numbers() -> None:
    """An infinity becomes the largest scale, a NaN fills only its block, and a tiny value becomes zero."""
    values = torch.zeros(5, BLOCK)
    values[0, :3] = torch.tensor([torch.inf, -torch.inf, 1.0])
    values[1, :2] = torch.tensor([torch.nan, 1.0])
    values[2, :2] = torch.tensor([1.0, -0.5])
    values[3, :2] = torch.tensor([1e-30, -1e-40])
    codes, scales = encode(Code.SIGNED, values.flatten())
    found = decode(Code.SIGNED, codes, scales).view(5, BLOCK)
    assert found[0, :3].tolist() == [LARGEST_SCALE, -LARGEST_SCALE, 0.0]
    assert found[1].isnan().all()
    assert found[2, 0] == 1.0 and found[2, 1].item() == pytest.approx(-0.5, rel=0.02)
    assert (found[3:] == 0).all()
    assert (codes.view(5, BLOCK)[4] == 0).all() and scales.isnan().tolist() == [False, True, *[False] * 3]
