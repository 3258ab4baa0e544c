# mypy: disallow-untyped-defs=False
"""The Triton program for narrow formats: blocks of values to codes and scales, and back.

It is the counterpart of `narrow.h` on a GPU. A program takes a few blocks as a tile `[blocks, elements]`. It
reads every value and writes every code once; two codes of 4 bits become a byte, and a byte two codes, in
registers.

Invariant: the program gives the bits of `kernels/narrow.py`: quotients are correctly rounded, and codes come
from integer arithmetic, independent of any compiler's cast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zerodrift.kernels.programs import BLOCK, bf16_even, bits_of, load_wide, random_words, value_of, wide_bf16

E4M3, E5M2, E2M1, INT8, INT4, NF4 = (tl.constexpr(element) for element in range(6))
SCALE_BF16, SCALE_E8M0 = tl.constexpr(1), tl.constexpr(2)
ENCODE, DECODE_AND_ADD = tl.constexpr(0), tl.constexpr(2)

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
LEAST, MOST = tl.constexpr((127 - 96) << 23), tl.constexpr((127 + 126) << 23)
INTEGERS = tl.constexpr(12582912.0)  # 1.5 * 2^23: an fp32 value whose last bit is one


@triton.jit
def _scales(most, largest: tl.constexpr, exponent: tl.constexpr, dtype: tl.constexpr):
    """Return the scale of blocks from the bits of their largest magnitudes: zero, a normal number, or NaN."""
    capped = tl.minimum(most, MOST)
    if dtype == SCALE_E8M0:
        scale = value_of((capped & INFINITY) - (exponent << 23))
    else:
        scale = tl.div_rn(value_of(capped), value_of(capped) * 0.0 + largest)
        if dtype == SCALE_BF16:
            scale = wide_bf16(bf16_even(scale))
    return tl.where(most < LEAST, 0.0, tl.where(most >= INFINITY, float("nan"), scale))


@triton.jit
def _is_drawn_up(share, draw):
    """Return 1 where 16 random bits round up a value that is `share` of a step above a number."""
    return (share + draw.to(tl.int32).to(tl.float32) * 0.0000152587890625 >= 1.0).to(tl.uint32)


@triton.jit
def _float_codes(quotients, largest, draw, width: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr):
    """Return the codes of a small floating-point element: nearest, ties to even, or by 16 random bits."""
    bits = bits_of(quotients)
    part = tl.minimum(bits & MAGNITUDE, bits_of(largest))
    shift: tl.constexpr = 23 - mantissa
    if draw is None:
        normal = (part - ((127 - bias) << 23) + ((1 << (shift - 1)) - 1) + ((part >> shift) & 1)) >> shift
        magic: tl.constexpr = (127 + 24 - bias - mantissa) << 23  # a value whose last bit is a subnormal step
        small = bits_of(value_of(part) + value_of(part * 0 + magic)) - magic
    else:
        normal = (part - ((127 - bias) << 23) + (draw << (shift - 16))) >> shift
        per_step: tl.constexpr = (127 - 1 + bias + mantissa) << 23  # one over the subnormal step
        steps = tl.where(part < ((128 - bias) << 23), value_of(part) * value_of(part * 0 + per_step), 0.0)
        below = steps.to(tl.int32)
        small = below.to(tl.uint32) + _is_drawn_up(steps - below.to(tl.float32), draw)
    code = tl.where(part < ((128 - bias) << 23), small, normal)
    return code | ((bits >> 31) << (width - 1))


@triton.jit
def _codes(quotients, largest, numbers, draw, element: tl.constexpr):
    """Return codes, rounded to nearest, or up or down by 16 random bits; NF4 always to nearest."""
    if element == E4M3:
        return _float_codes(quotients, largest, draw, 8, 3, 7)
    elif element == E5M2:
        return _float_codes(quotients, largest, draw, 8, 2, 15)
    elif element == E2M1:
        return _float_codes(quotients, largest, draw, 4, 1, 1)
    elif element == NF4:
        code = (bits_of(quotients) * 0).to(tl.uint32)
        for lower in tl.static_range(15):
            pair = tl.load(numbers + lower).to(tl.float64) + tl.load(numbers + lower + 1).to(tl.float64)
            code += (quotients > (pair * 0.5).to(tl.float32)).to(tl.uint32)
        return code
    else:
        part = tl.maximum(tl.minimum(quotients, largest), -largest)
        if draw is None:
            code = bits_of(part + INTEGERS)
        else:
            below = part.to(tl.int32)
            below -= (below.to(tl.float32) > part).to(tl.int32)
            code = below.to(tl.uint32, bitcast=True) + _is_drawn_up(part - below.to(tl.float32), draw)
        return code & (255 if element == INT8 else 15)


@triton.jit(do_not_specialize=["number"])
def narrow(
    codes,  # uint8
    scales,  # fp32, the bits of bf16, or the exponents of e8m0 as uint8
    values,  # fp32, fp16, or the bits of bf16
    numbers,  # fp32: the number of every code
    keys,  # int64 for each 256 elements, by which codes are rounded up or down; None: to nearest
    number,  # of the draw, mixed
    numel,
    largest: tl.constexpr,
    exponent: tl.constexpr,  # of `largest`
    way: tl.constexpr,
    element: tl.constexpr,
    bits: tl.constexpr,  # of a code
    block: tl.constexpr,  # elements
    scale: tl.constexpr,  # its dtype
    tile: tl.constexpr,  # blocks per program
):
    """Encode or decode `tile` blocks of a run, as `native.cpp` does."""
    place = tl.program_id(0).to(tl.int64)
    block_at = place * tile + tl.arange(0, tile)
    there = block_at * block < numel
    at = block_at[:, None] * block + tl.arange(0, block)[None, :]
    mask = at < numel
    pairs: tl.constexpr = bits == 4
    if pairs:
        byte = block_at[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
    else:
        byte = at
    held = byte < (numel // 2 if pairs else numel)
    if way == ENCODE:
        wide = load_wide(values, at, mask)
        most = tl.max(bits_of(wide) & MAGNITUDE, 1)
        limit = tl.zeros_like(wide) + largest
        step = _scales(most, largest, exponent, scale)
        usable = step > 0.0
        divisor = tl.where(usable, step, 1.0)
        if scale == SCALE_E8M0:  # a power of two: the product with its inverse is the quotient
            quotients = wide * tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)[:, None]
        else:
            quotients = tl.div_rn(wide, tl.zeros_like(wide) + divisor[:, None])
        quotients = tl.where(usable[:, None], quotients, 0.0)
        if keys is None:
            code = _codes(quotients, limit, numbers, None, element)
        else:
            keyed: tl.constexpr = tile * block // BLOCK
            span = place * keyed + tl.arange(0, keyed)
            words = random_words(keys, span, span * BLOCK < numel, number)
            draw = tl.reshape(words, (tile, block)) & 0xFFFF
            code = _codes(quotients, limit, numbers, draw, element)
        if pairs:
            first, second = tl.split(tl.reshape(code, (tile, block // 2, 2)))
            code = (first << 4 | second) if element == NF4 else (second << 4 | first)
        tl.store(codes + byte, code.to(tl.uint8), mask=held)
        if scale == SCALE_E8M0:
            tl.store(scales + block_at, (bits_of(step) >> 23 & 0xFF).to(tl.uint8), mask=there)
        elif scale == SCALE_BF16:
            tl.store(scales + block_at, bf16_even(step), mask=there)
        else:
            tl.store(scales + block_at, step, mask=there)
    else:
        code = tl.load(codes + byte, mask=held, other=0).to(tl.int32)
        if pairs:
            low, high = code & 15, code >> 4
            both = tl.join(high, low) if element == NF4 else tl.join(low, high)
            code = tl.reshape(both, (tile, block))
        step = tl.load(scales + block_at, mask=there, other=0)
        if scale == SCALE_E8M0:
            raised = step.to(tl.uint32)
            power = tl.where(raised == 0, 0x400000, raised << 23)
            step = value_of(tl.where(raised == 255, 0x7FC00000, power).to(tl.uint32))
        elif scale == SCALE_BF16:
            step = wide_bf16(step)
        decoded = tl.load(numbers + code) * step[:, None]
        if way == DECODE_AND_ADD:
            decoded = tl.load(values + at, mask=mask, other=0.0) + decoded
        if values.dtype.element_ty == tl.int16:
            tl.store(values + at, bf16_even(decoded), mask=mask)
        else:
            tl.store(values + at, decoded.to(values.dtype.element_ty), mask=mask)
