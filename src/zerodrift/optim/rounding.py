"""Conversions of fp32 values: to 16 bits at random, to two halves without loss, to 8-bit codes.

Stochastic rounding rounds up with a probability equal to the value's distance from the lower neighbour, so
the mean is kept: a bf16 moment that decays by less than half an ulp a step still decays on average.
The random bits of an element are a word of `kernels/random_bits.py`: its low half serves the first moment,
its high half the second.

A split value is a bf16 value and 16 more bits. `high` is what the model sees: the value rounded to bf16,
nearest, ties away from zero. `low` is the signed rest, in units of the last of the 32 bits. With this
rounding the rest always lies in [-2^15, 2^15), so 16 bits are enough; `join` is one shift and one addition.
Rounding ties to even could not be undone. A NaN is stored as (0x7FC0, 0): other NaN patterns would carry into
the sign and show as -0.0. Values beyond the largest bf16 show as infinity in `high`, and still join exactly.

Invariant: `join(*split(x))` has the bits of x, for all 2^32 of them but NaNs, which join to one quiet NaN.
`encode(decode(codes, scales))` without random bits gives the same codes and scales, bit for bit: a moment
that is saved in fp32 and read back is the moment that was there.

[Note: codes] An 8-bit moment has one code per element and one fp32 scale per block of 256 elements. The scale
is the largest magnitude of its block; a code stands for a fraction of it, in steps that grow finer towards
one: the dynamic code of Dettmers et al. (8-bit Optimizers via Block-wise Quantization, 2022). The place of a
code's leading one is its decade and the bits behind it count equal steps within, so decade i has 2^i of them.
A first moment has a sign and seven bits, 1e-6 to 1 of the scale; a second moment, which is never negative,
has eight, 1e-7 to 1. Blocks begin where the parameter does, so no slicing moves them.

An update rounds codes up or down at random, so that the mean is kept. At a beta2 of 0.999 a second moment
changes by a thousandth per step, and neighbouring codes are a hundredth apart or more. Rounded to nearest, a
moment would never change while a larger value fixes the scale of its block. A nonzero second moment is never
stored as zero, but as the smallest code, because the update divides by its root.

A block whose largest value is under 2^-96 is stored as zeros: the root of such a second moment is far below
any eps. Infinities are stored as the largest scale, 2^126, and one NaN makes its block NaN.
"""

from __future__ import annotations

import enum
import functools
from fractions import Fraction

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK

NAN_HIGH = 0x7FC0
"""The bits of the one NaN that `high` ever holds."""


def round_stochastic(values: Tensor, words: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down by the low 16 bits of `words`. NaNs become the quiet one."""
    bits = values.contiguous().view(torch.int32)
    # Adding to the bits moves away from zero for both signs. Only a NaN could wrap, and is replaced.
    moved = bits + (words & 0xFFFF).to(torch.int32)
    rounded = moved.bitwise_right_shift_(16).to(torch.int16).masked_fill_(values.isnan(), NAN_HIGH)
    return rounded.view(torch.bfloat16)


def split(values: Tensor, high: Tensor | None = None, low: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split fp32 into (bf16, int16), in the memory of `high` and `low` if given."""
    bits = values.contiguous().view(torch.int32)
    nan = values.isnan()
    # In a NaN the addition may wrap; those are replaced.
    rounded = (bits + 0x8000).bitwise_right_shift_(16).to(torch.int16).masked_fill_(nan, NAN_HIGH)
    rest = bits.to(torch.int16).masked_fill_(nan, 0)
    visible = rounded.view(torch.bfloat16)
    high = visible if high is None else high.copy_(visible)
    low = rest if low is None else low.copy_(rest)
    return high, low


def join(high: Tensor, low: Tensor) -> Tensor:
    """Join (bf16, int16) to fp32."""
    bits = high.contiguous().view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low)
    return bits.view(torch.float32)


def round_away(values: Tensor) -> Tensor:
    """Round fp32 to bf16 as `split` does: nearest, ties away from zero."""
    return split(values)[0]


# --- 8-bit moments; see [Note: codes] ---------------------------------------------------------------------


LEVELS = 8
"""Decades of the longer code, and places in the tables of both codes."""

LEAST_SCALE, LARGEST_SCALE = 2.0**-96, 2.0**126
"""Between these a scale has an inverse, and its least code is a normal number."""

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_LEAST_BITS, _LARGEST_BITS = (127 - 96) << 23, (127 + 126) << 23


class Code(enum.Enum):
    """The numbers that the 256 codes stand for."""

    SIGNED = 0
    """First moments: a sign and 7 decades."""
    UNSIGNED = 1
    """Second moments: 8 decades."""

    @property
    def top(self) -> int:
        """The code of the scale itself."""
        return 127 if self is Code.SIGNED else 255


def code_of(moment: int) -> Code:
    """Return the code of an algorithm's first (0) or second (1) moment."""
    return Code.SIGNED if moment == 0 else Code.UNSIGNED


@functools.cache
def tables(device: torch.device) -> Tensor:
    """Return `struct Code` of codes.h, a row per code, fp32: where decades begin (8 places, the last ones out
    of reach), each decade's first value (8) and steps per unit (8), and the value of every code (256)."""
    # Through fp64, which rounds every fraction once more than fp32 would, and equally on all machines.
    return torch.tensor([_table(code) for code in Code], dtype=torch.float64).float().to(device)


def _table(code: Code) -> list[float]:
    last = code.top.bit_length() - 1
    tops = [Fraction(1, 10 ** (last - level)) for level in range(last + 1)]
    bounds, starts = tops[:-1], [Fraction(0), *tops[:-1]]
    steps = [(top - start) / 2**level for level, (top, start) in enumerate(zip(tops, starts, strict=True))]
    values = [Fraction(0)]
    for level, (start, step) in enumerate(zip(starts, steps, strict=True)):
        values += [start + step * (place + 1) for place in range(2**level)]
    magnitudes = [float(value) for value in values]
    signed = [-value for value in magnitudes if code is Code.SIGNED]

    def filled(numbers: list[Fraction], fill: float) -> list[float]:
        return [*map(float, numbers), *[fill] * (LEVELS - len(numbers))]

    inverse = [1 / step for step in steps]
    return [*filled(bounds, 2.0), *filled(starts, 0.0), *filled(inverse, 0.0), *magnitudes, *signed]


def decode(code: Code, codes: Tensor, scales: Tensor) -> Tensor:
    """Decode uint8 codes and a scale per block to fp32."""
    values = tables(codes.device)[code.value, 3 * LEVELS :]
    return values[codes.int()].mul_(scales.repeat_interleave(BLOCK)[: codes.numel()])


def encode(code: Code, values: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode fp32 as (uint8 codes, a scale per block).

    `draws` are 16 random bits per element, in [0, 65536); without them a value goes to the nearest code.
    """
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    magnitudes = blocks.view(torch.int32) & _MAGNITUDE
    scales = _scales(magnitudes.amax(1))
    inverse = torch.where(scales > 0, 1 / scales, 0)
    part = blocks.abs().mul_(inverse[:, None])
    part = torch.where(part <= 1, part, 1).flatten()[: values.numel()]  # a NaN is 1 as well
    bounds, starts, steep = tables(values.device)[code.value, : 3 * LEVELS].view(3, LEVELS)
    level = torch.bucketize(part, bounds)
    share = 0.5 if draws is None else draws.float().mul_(2.0**-16)
    steps = part.sub_(starts[level]).mul_(steep[level]).add_(share).int()
    codes = ((1 << level.int()) - 1 + steps).clamp_(max=code.top)
    if code is Code.SIGNED:
        codes += (torch.signbit(values) & ~values.isnan()).int() << 7
    else:
        is_nonzero = (magnitudes != 0) & (scales != 0)[:, None]
        codes = torch.maximum(codes, is_nonzero.flatten()[: values.numel()].int())
    return codes.to(torch.uint8), scales


def _scales(most: Tensor) -> Tensor:
    """Return the scale of blocks from the bits of their largest magnitude."""
    kept = most.clamp(max=_LARGEST_BITS).masked_fill_(most < _LEAST_BITS, 0)
    return kept.view(torch.float32).masked_fill_(most > _INFINITY, torch.nan)
