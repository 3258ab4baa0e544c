"""An fp32 value as a bf16 value and 16 more bits, and back, without loss.

`high` is what the model sees: the value rounded to bf16, nearest, ties away from zero. `low` is the signed
rest, in units of the last of the 32 bits. Rounding this way is what makes 16 bits enough: the rest always
lies in [-2^15, 2^15), so `join` is one shift and one addition. Rounding ties to even could not be undone.

A NaN is stored as (0x7FC0, 0): other NaN patterns would carry into the sign and show as -0.0. Values beyond
the largest bf16 show as infinity in `high`, as they do after any rounding to bf16, and still join exactly.

Invariant: `join(*split(x))` has the bits of x, for all 2^32 of them but NaNs, which join to one quiet NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAN_HIGH = 0x7FC0
"""The bits of the one NaN that `high` ever holds."""


def split(values: Tensor, high: Tensor | None = None, low: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp32 -> (bf16, int16). Writes into `high` and `low` where they are given."""
    bits = values.contiguous().view(torch.int32)
    nan = values.isnan()
    # In a NaN the addition may wrap; those are replaced.
    rounded = (bits + 0x8000).bitwise_right_shift_(16).to(torch.int16).masked_fill_(nan, NAN_HIGH)
    rest = bits.to(torch.int16).masked_fill_(nan, 0)
    visible = rounded.view(torch.bfloat16)
    high = visible if high is None else high.copy_(visible)
    low = rest if low is None else low.copy_(rest)
    return high, low


def join(high: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """(bf16, int16) -> fp32. Writes into `out` where it is given."""
    bits = high.contiguous().view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low)
    values = bits.view(torch.float32)
    return values if out is None else out.copy_(values)


def round_away(values: Tensor) -> Tensor:
    """fp32 -> bf16 as `split` rounds: nearest, ties away from zero."""
    return split(values)[0]
