"""Sums of squares per block of 256 elements, and their exact total.

A block is summed in fp64 in a fixed order, where the squares of fp32 values are exact: additions go over 16
lanes and then by halves. Blocks are added as integers: each sum is split into 32-bit digits of one long
fixed-point number. So any grouping of blocks over slices, ranks and stages gives the same total to the last
bit, and one integer all-reduce carries the norm and the count of non-finite blocks together.

`engine/step/norm.py` computes a norm, a clip factor and a skip decision from the total.

Invariant: the total of a set of blocks is exact, independent of the order, and cannot overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.kernels import device, native

LANES = 16

DIGITS = 44
"""Number of 32-bit digits: from 2^-352 to the largest double. The least square of an fp32 value is 2^-298."""

LOWEST = -352
"""The lowest digit counts multiples of 2^LOWEST."""

AT_ONCE = 1 << 20
"""Blocks whose sums are added in one call: 2^28 elements, in 8 MiB."""

_MASK = 0xFFFFFFFF


def block_square_sums(flat: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the sum of squares of each 256 elements of a flat fp32, bf16 or fp16 tensor, in fp64.

    A sum is finite if and only if every element of its block is: 256 squares of fp32 values cannot overflow
    fp64. So the same pass shows whether a gradient is finite.
    """
    blocks = -(-flat.numel() // BLOCK)
    if out is None:
        out = torch.empty(blocks, dtype=torch.float64, device=flat.device)
    flat = flat.contiguous()
    if flat.numel() and device.works(flat.device):
        return device.squares(flat, out)
    built = native.library() if flat.device.type == "cpu" else None
    if built is None:
        return out.copy_(reference_square_sums(flat))
    kind = native.TYPES[flat.dtype]
    built.squares(flat.numel(), flat.data_ptr(), kind, out.data_ptr(), torch.get_num_threads())
    return out


def reference_square_sums(flat: Tensor) -> Tensor:
    """Define `block_square_sums` in plain torch."""
    blocks = -(-flat.numel() // BLOCK)
    wide = flat.new_zeros(blocks * BLOCK, dtype=torch.float64)
    wide[: flat.numel()] = flat
    squares = wide.square_().view(blocks, BLOCK // LANES, LANES)
    lanes = squares[:, 0].clone()
    for row in range(1, BLOCK // LANES):
        lanes += squares[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def digits(sums: Tensor, out: Tensor | None = None) -> Tensor:
    """Add block sums to a long integer: int64 of DIGITS places, then the count of non-finite blocks.

    Pass `out` to add to earlier sums. Digits of several tensors or ranks are added place by place; every call
    leaves its places below 2^34, so 2^29 of them can be added before a place could overflow.
    """
    if out is None:
        out = torch.zeros(DIGITS + 1, dtype=torch.int64, device=sums.device)
    sums, built = sums.contiguous(), native.library() if sums.device.type == "cpu" else None
    if built is not None and out.is_contiguous():
        built.digits(sums.numel(), sums.data_ptr(), out.data_ptr())
    elif sums.numel() and device.works(sums.device):
        device.digits(sums, out, LOWEST)
    else:
        reference_digits(sums, out)
    carry = out[: DIGITS - 1] >> 32
    out[: DIGITS - 1] &= _MASK
    out[1:DIGITS] += carry
    return out


def add_squares(flats: Sequence[Tensor], out: Tensor) -> None:
    """Add the squares of the elements of flat tensors to the digits in `out`, in one addition."""
    blocks = [-(-flat.numel() // BLOCK) for flat in flats]
    sums = torch.empty(sum(blocks), dtype=torch.float64, device=out.device)
    for flat, mine in zip(flats, sums.split(blocks), strict=True):
        block_square_sums(flat, mine)
    for some in sums.split(AT_ONCE):
        digits(some, out)


def reference_digits(sums: Tensor, out: Tensor) -> None:
    """Define the compiled `digits` in plain torch, but for the carry."""
    bits = sums.view(torch.int64)
    exponent = (bits >> 52) & 0x7FF
    out[DIGITS] += (exponent == 0x7FF).sum()
    mantissa = (bits & ((1 << 52) - 1)) + ((exponent > 0).long() << 52)
    place = exponent.clamp(min=1) - 1075 - LOWEST
    mantissa = mantissa.masked_fill((exponent == 0x7FF) | (place < 0), 0)
    place = place.clamp(min=0)
    digit, shift = place // 32, place % 32
    digit = digit.clamp(max=DIGITS - 3)
    low, high = (mantissa & _MASK) << shift, (mantissa >> 32) << shift
    out.index_add_(0, digit, low & _MASK)
    # A 32-bit value shifted by up to 31 places stays below 2^63, so `>>` extends no sign.
    out.index_add_(0, digit + 1, (low >> 32) + (high & _MASK))
    out.index_add_(0, digit + 2, high >> 32)


def total(summed: Tensor | Sequence[int]) -> float:
    """Return the exact sum of digits, rounded once to fp64; infinity if a block was not finite.

    The digits of a tensor are read to the host.
    """
    places = summed.tolist() if isinstance(summed, Tensor) else summed
    if places[DIGITS]:
        return math.inf
    value = sum(place << (32 * index) for index, place in enumerate(places[:DIGITS]))
    return float(Fraction(value) * Fraction(2) ** LOWEST)
