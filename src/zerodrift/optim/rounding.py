"""Conversions of fp32 values to 16 bits: rounded stochastically, or split in two halves without loss.

Stochastic rounding goes up with the probability of a value's distance from below, so the mean is kept where
nearest rounding would keep nothing: a bf16 moment that decays by less than half an ulp a step still decays.
The random bits of an element are a word of `kernels/random_bits.py`: its low half serves the first moment,
its high half the second.

A split value is a bf16 value and 16 more bits. `high` is what the model sees: the value rounded to bf16,
nearest, ties away from zero. `low` is the signed rest, in units of the last of the 32 bits. Rounding this way
is what makes 16 bits enough: the rest always lies in [-2^15, 2^15), so `join` is one shift and one addition.
Rounding ties to even could not be undone. A NaN is stored as (0x7FC0, 0): other NaN patterns would carry into
the sign and show as -0.0. Values beyond the largest bf16 show as infinity in `high`, and still join exactly.

Invariant: `join(*split(x))` has the bits of x, for all 2^32 of them but NaNs, which join to one quiet NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
