# mypy: disallow-untyped-defs=False
"""The Triton program for narrow formats: blocks of values to codes and scales, and back.

It is the counterpart of `narrow.h` on a GPU. A program takes a few blocks as a tile `[blocks, elements]`. It
reads every value and writes every code once; two codes of 4 bits become a byte, and a byte two codes, in
registers.

Invariant: the program leaves the bits of `kernels/narrow.py`: quotients are correctly rounded, and codes come
from integer arithmetic, independent of any compiler's cast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zerodrift.kernels.programs import bf16_even, bits_of, load_wide, value_of

E4M3, E5M2, E2M1, INT8, INT4, NF4 = (tl.constexpr(element) for element in range(6))
EXACT, FLOOR = tl.constexpr(0), tl.constexpr(1)
ENCODE, DECODE_AND_ADD = tl.constexpr(0), tl.constexpr(2)

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
LEAST, MOST = tl.constexpr((127 - 96) << 23), tl.constexpr((127 + 126) << 23)
INTEGERS = tl.constexpr(12582912.0)  # 1.5 * 2^23: an fp32 value whose last bit is one


@triton.jit
def _scales(most, largest: tl.constexpr, exponent: tl.constexpr, rule: tl.constexpr):
    """Return the scale of blocks from the bits of their largest magnitudes: zero, a normal number, or NaN."""
    capped = tl.minimum(most, MOST)
    if rule == FLOOR:
        scale = value_of((capped & INFINITY) - (exponent << 23))
    else:
        scale = tl.div_rn(value_of(capped), value_of(capped) * 0.0 + largest)
        if rule != EXACT:
            scale = value_of((bits_of(scale) + 0x7FFFFF) & INFINITY)
    return tl.where(most < LEAST, 0.0, tl.where(most >= INFINITY, float("nan"), scale))


@triton.jit
def _float_codes(quotients, largest, width: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr):
    """Return the codes of a small floating-point element: nearest, ties to even."""
    bits = bits_of(quotients)
    part = tl.minimum(bits & MAGNITUDE, bits_of(largest))
    shift: tl.constexpr = 23 - mantissa
    normal = (part - ((127 - bias) << 23) + ((1 << (shift - 1)) - 1) + ((part >> shift) & 1)) >> shift
    magic: tl.constexpr = (127 + 24 - bias - mantissa) << 23  # a value whose last bit is a subnormal step
    small = bits_of(value_of(part) + value_of(part * 0 + magic)) - magic
    code = tl.where(part < ((128 - bias) << 23), small, normal)
    return code | ((bits >> 31) << (width - 1))


@triton.jit
def _codes(quotients, largest, numbers, element: tl.constexpr):
    if element == E4M3:
        return _float_codes(quotients, largest, 8, 3, 7)
    elif element == E5M2:
        return _float_codes(quotients, largest, 8, 2, 15)
    elif element == E2M1:
        return _float_codes(quotients, largest, 4, 1, 1)
    elif element == NF4:
        code = (bits_of(quotients) * 0).to(tl.uint32)
        for lower in tl.static_range(15):
            pair = tl.load(numbers + lower).to(tl.float64) + tl.load(numbers + lower + 1).to(tl.float64)
            code += (quotients > (pair * 0.5).to(tl.float32)).to(tl.uint32)
        return code
    else:
        part = tl.maximum(tl.minimum(quotients, largest), -largest)
        return bits_of(part + INTEGERS) & (255 if element == INT8 else 15)


@triton.jit
def narrow(
    codes,  # uint8
    scales,  # fp32, or the exponents of e8m0 as uint8
    values,  # fp32, fp16, or the bits of bf16
    numbers,  # fp32: the number of every code
    numel,
    largest: tl.constexpr,
    exponent: tl.constexpr,  # of `largest`
    way: tl.constexpr,
    element: tl.constexpr,
    bits: tl.constexpr,  # of a code
    block: tl.constexpr,  # elements
    rule: tl.constexpr,
    exponents: tl.constexpr,
    tile: tl.constexpr,  # blocks per program
):
    """Encode or decode `tile` blocks of a run, as `native.cpp` does."""
    number = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    there = number * block < numel
    at = number[:, None] * block + tl.arange(0, block)[None, :]
    mask = at < numel
    pairs: tl.constexpr = bits == 4
    if pairs:
        byte = number[:, None] * (block // 2) + tl.arange(0, block // 2)[None, :]
    else:
        byte = at
    held = byte < (numel // 2 if pairs else numel)
    if way == ENCODE:
        wide = load_wide(values, at, mask)
        most = tl.max(bits_of(wide) & MAGNITUDE, 1)
        limit = tl.zeros_like(wide) + largest
        scale = _scales(most, largest, exponent, rule)
        usable = scale > 0.0
        divisor = tl.where(usable, scale, 1.0)
        if rule == EXACT:
            quotients = tl.div_rn(wide, tl.zeros_like(wide) + divisor[:, None])
        else:  # a power of two: the product with its inverse is the quotient
            quotients = wide * tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)[:, None]
        quotients = tl.where(usable[:, None], quotients, 0.0)
        code = _codes(quotients, limit, numbers, element)
        if pairs:
            first, second = tl.split(tl.reshape(code, (tile, block // 2, 2)))
            code = (first << 4 | second) if element == NF4 else (second << 4 | first)
        tl.store(codes + byte, code.to(tl.uint8), mask=held)
        if exponents:
            tl.store(scales + number, (bits_of(scale) >> 23 & 0xFF).to(tl.uint8), mask=there)
        else:
            tl.store(scales + number, scale, mask=there)
    else:
        code = tl.load(codes + byte, mask=held, other=0).to(tl.int32)
        if pairs:
            low, high = code & 15, code >> 4
            both = tl.join(high, low) if element == NF4 else tl.join(low, high)
            code = tl.reshape(both, (tile, block))
        scale = tl.load(scales + number, mask=there, other=0)
        if exponents:
            exponent = scale.to(tl.uint32)
            power = tl.where(exponent == 0, 0x400000, exponent << 23)
            scale = value_of(tl.where(exponent == 255, 0x7FC00000, power).to(tl.uint32))
        decoded = tl.load(numbers + code) * scale[:, None]
        if way == DECODE_AND_ADD:
            decoded = tl.load(values + at, mask=mask, other=0.0) + decoded
        if values.dtype.element_ty == tl.int16:
            tl.store(values + at, bf16_even(decoded), mask=mask)
        else:
            tl.store(values + at, decoded.to(values.dtype.element_ty), mask=mask)
