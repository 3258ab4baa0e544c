# mypy: disallow-untyped-defs=False
"""Triton programs: one optimizer step in one pass, sums of squares per block, sums of parts, and prints.

The programs are the counterpart of `native.cpp` on a GPU: the same blocks of 256 elements, the same table of
coefficients, the same kinds. A program takes a few blocks as a tile `[blocks, 256]`, converts to fp32,
updates in fp32 and rounds to the stored dtypes, so every byte is read and written once.

bf16 is passed as bits, in tensors viewed as int16, and rounded by explicit integer arithmetic, independent of
any compiler's cast. `device.py` launches the programs, with the tensors of `optim/fused.py`.

Invariant: these programs give the bits of `native.cpp`. Multiply and add are fused where `native.cpp` fuses
them and nowhere else (launched with `enable_fp_fusion=False`), divisions and roots are correctly rounded, and
every sum within a block has a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zerodrift import dtypes

BLOCK = tl.constexpr(dtypes.BLOCK)
LANES = tl.constexpr(16)
LEVELS = tl.constexpr(8)
WIDTH = tl.constexpr(12)  # numbers per group, as in `struct Group`
CODE = tl.constexpr(24 + 256)  # numbers per code, as in `struct Code`
PRINT_STEP, PRINT_TURN, PRINT_FOLD = (tl.constexpr(n) for n in (0x9E3779B1, 15, 0x9E3779B97F4A7C15))

MASTER_FP32, MASTER_SPLIT = tl.constexpr(0), tl.constexpr(1)
STATE_FP32, STATE_BF16, STATE_STOCHASTIC, STATE_8BIT = (tl.constexpr(kind) for kind in range(4))
BF16_SUM, FP16_SUM = tl.constexpr(1), tl.constexpr(2)
ADAM, SGD = tl.constexpr(0), tl.constexpr(1)

QUIET = tl.constexpr(0x7FC0)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
LEAST_SCALE, LARGEST_SCALE = tl.constexpr((127 - 96) << 23), tl.constexpr((127 + 126) << 23)


# --- formats --------------------------------------------------------------------------------------------


@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def value_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _is_nan(bits):
    return (bits & MAGNITUDE) > INFINITY


@triton.jit
def wide_bf16(high):
    """Convert bf16 bits in int16 to fp32."""
    return value_of(high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def load_wide(data, at, mask):
    """Load fp32, fp16, or the bits of bf16, as fp32."""
    held = tl.load(data + at, mask=mask, other=0)
    if data.dtype.element_ty == tl.int16:
        return wide_bf16(held)
    else:
        return held.to(tl.float32)


@triton.jit
def _bf16(bits, rounded):
    """Return the upper half of `rounded` as int16; one quiet NaN if fp32 `bits` are a NaN."""
    high = (rounded >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
    return tl.where(_is_nan(bits), QUIET, high).to(tl.int16)


@triton.jit
def bf16_even(x):
    bits = bits_of(x)
    return _bf16(bits, bits + 0x7FFF + ((bits >> 16) & 1))


# --- random words ---------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def random_words(keys, block, there, stochastic):
    """Draw 32 random bits per element; see [Note: random bits] in updates.h. Shape [blocks, 256]."""
    key = tl.load(keys + block, mask=there, other=0)
    key = _mix((key ^ stochastic.to(tl.int64)).to(tl.uint64, bitcast=True))
    low, high = key.to(tl.uint32)[:, None], (key >> 32).to(tl.uint32)[:, None]
    place = tl.arange(0, BLOCK).to(tl.uint32)[None, :]
    word = place * 0x9E3779B9 + low
    word = (word ^ (word >> 16)) * 0x21F0AAAD
    word = ((word ^ (word >> 15)) + high) * 0xD35A2D97
    return word ^ (word >> 15)


# --- moments in memory ----------------------------------------------------------------------------------


@triton.jit
def _load_moment(moment, scale, codes, number: tl.constexpr, block, there, at, mask, state: tl.constexpr):
    if state == STATE_8BIT:
        code = tl.load(moment + at, mask=mask, other=0).to(tl.int32)
        value = tl.load(codes + number * CODE + 3 * LEVELS + code)
        return value * tl.load(scale + block, mask=there, other=0)[:, None]
    else:
        return load_wide(moment, at, mask)


@triton.jit
def _store_moment(
    x, moment, scale, codes, number: tl.constexpr, words, block, there, at, mask, state: tl.constexpr
):
    if state == STATE_FP32:
        tl.store(moment + at, x, mask=mask)
    elif state == STATE_BF16:
        tl.store(moment + at, bf16_even(x), mask=mask)
    elif state == STATE_STOCHASTIC:
        bits, draws = bits_of(x), (words >> (16 * number)) & 0xFFFF
        tl.store(moment + at, _bf16(bits, bits + draws), mask=mask)
    else:
        draws = (words >> (16 * number)) & 0xFFFF
        # Elements beyond the end must not count in the block's scale.
        code, largest = _encode(tl.where(mask, x, 0.0), codes + number * CODE, number == 0, draws)
        tl.store(moment + at, code, mask=mask)
        tl.store(scale + block, largest, mask=there)


@triton.jit
def _encode(x, code, signed: tl.constexpr, draws):
    """Encode fp32 as codes and a scale per block; see `optim/rounding.py`."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    most = tl.max(magnitude, 1)
    scale = value_of(tl.minimum(most, LARGEST_SCALE))
    scale = tl.where(most < LEAST_SCALE, 0.0, tl.where(most > INFINITY, float("nan"), scale))
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    part = value_of(magnitude) * inverse[:, None]
    part = tl.where(part <= 1.0, part, 1.0)  # a NaN is 1 as well
    # At most one decade begins between two powers of two, so the exponent gives the decade or the
    # one below it.
    level = ((bits_of(part) >> 23).to(tl.int32) * 5 >> 4) - (33 if signed else 32)
    level = tl.maximum(level, 0)
    level += (part > tl.load(code + level)).to(tl.int32)
    start, steep = tl.load(code + LEVELS + level), tl.load(code + 2 * LEVELS + level)
    share = value_of(0x3F800000 | (draws << 7)) - 1.0  # draws * 2^-16
    number = (1 << level) - 1 + ((part - start) * steep + share).to(tl.int32)
    number = tl.minimum(number, 127 if signed else 255)
    if signed:
        number = number | tl.where((bits >> 31 != 0) & (magnitude <= INFINITY), 128, 0)
    else:
        # A nonzero value never gets the code of zero.
        number = tl.maximum(number, ((magnitude != 0) & (scale != 0.0)[:, None]).to(tl.int32))
    return number.to(tl.uint8), scale


# --- the arithmetic -------------------------------------------------------------------------------------


@triton.jit
def _sum(c, a, b, once: tl.constexpr):
    """Return a * b + c, rounded once or twice."""
    if once:
        return tl.fma(a, b, c)
    else:
        return a * b + c


@triton.jit
def _adam(p, m, v, g, row, fma_addcmul: tl.constexpr, fma_lerp: tl.constexpr):
    blend1, step = tl.load(row + 3), tl.load(row + 9)
    # torch.lerp starts from the nearer end: the old moment for a weight under one half.
    near = tl.abs(blend1) < 0.5
    m = _sum(tl.where(near, m, g), tl.where(near, blend1, blend1 - 1.0), g - m, fma_lerp)
    v = _sum(v * tl.load(row + 6), tl.load(row + 5) * g, g, fma_addcmul)
    root = tl.div_rn(tl.sqrt_rn(v), tl.load(row + 7) + tl.zeros_like(v))
    change = tl.div_rn(step * m, root + tl.load(row + 8))
    decay = tl.load(row + 1)
    return p * decay + change, m, v, change + (decay - 1.0) * p


@triton.jit
def _sgd_momentum(m, g, row, fma_add: tl.constexpr):
    """Return the buffer, and the direction of the parameter's change."""
    keep1 = tl.load(row + 4)
    blended = _sum(m * keep1, tl.load(row + 3), g, fma_add)
    buffer = tl.where(tl.load(row + 10) != 0.0, g, blended)
    ahead = _sum(g, keep1, buffer, fma_add)
    moving = keep1 != 0.0
    taken = tl.where(tl.load(row + 11) != 0.0, ahead, buffer)
    return tl.where(moving, buffer, m), tl.where(moving, taken, g)


@triton.jit
def _lion(p, m, g, row, fma_add: tl.constexpr):
    step, decay = tl.load(row + 9), tl.load(row + 1)
    direction = _sum(m * tl.load(row + 4), tl.load(row + 3), g, fma_add)
    sign = tl.where(direction > 0.0, 1.0, tl.where(direction < 0.0, -1.0, 0.0))
    m = _sum(m * tl.load(row + 6), tl.load(row + 5), g, fma_add)
    return _sum(p * decay, step, sign, fma_add), m, step * sign + (decay - 1.0) * p


# --- the passes -----------------------------------------------------------------------------------------


@triton.jit
def _load_master(storage, master, at, mask, kind: tl.constexpr):
    if kind == MASTER_FP32:
        return tl.load(master + at, mask=mask, other=0.0)
    elif kind == MASTER_SPLIT:
        high = bits_of(load_wide(storage, at, mask))
        low = tl.load(master + at, mask=mask, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
        return value_of(high + low)
    else:
        return load_wide(storage, at, mask)


@triton.jit
def _store_master(p, storage, master, at, mask, kind: tl.constexpr):
    if kind == MASTER_FP32:
        tl.store(master + at, p, mask=mask)
    if kind == MASTER_SPLIT:
        bits = bits_of(p)
        low = tl.where(_is_nan(bits), 0, bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True)
        tl.store(master + at, low, mask=mask)
        tl.store(storage + at, _bf16(bits, bits + 0x8000), mask=mask)
    elif storage.dtype.element_ty == tl.int16:
        tl.store(storage + at, bf16_even(p), mask=mask)
    else:
        tl.store(storage + at, p.to(storage.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stochastic"])
def update(
    storage,  # fp32, fp16, or the bits of bf16
    grad,  # likewise
    master,  # fp32, int16, or None
    moment1,  # or None, as everything below but `table`
    moment2,
    scale1,  # fp32 per block
    scale2,
    codes,  # `blockwise.tables`
    groups,  # int32 per block; None: all in group 0
    keys,  # int64 per block
    table,  # fp32 [groups, WIDTH]
    wanted,  # fp32: receives the intended change of each weight
    numel,
    stochastic,  # the step's part of the random key
    master_kind: tl.constexpr,
    state: tl.constexpr,
    algorithm: tl.constexpr,
    fma_add: tl.constexpr,
    fma_addcmul: tl.constexpr,
    fma_lerp: tl.constexpr,
    tile: tl.constexpr,  # blocks per program
):
    """Run the update of native.cpp on `tile` blocks. The arguments are those of `struct Update`."""
    block = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    there = block * BLOCK < numel
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = at < numel
    row = table + tl.zeros_like(block)[:, None]
    if groups is not None:
        row += tl.load(groups + block, mask=there, other=0)[:, None] * WIDTH
    words = tl.zeros_like(at).to(tl.uint32)
    if keys is not None:
        words = random_words(keys, block, there, stochastic)

    g = load_wide(grad, at, mask) * tl.load(row)
    p = _load_master(storage, master, at, mask, master_kind)
    l2 = tl.load(row + 2)
    # Nothing is added for 0, as in torch: 0 * inf would be NaN.
    g = tl.where(l2 == 0.0, g, _sum(g, l2, p, fma_add))
    if moment1 is not None:
        m = _load_moment(moment1, scale1, codes, 0, block, there, at, mask, state)
    if algorithm == ADAM:
        v = _load_moment(moment2, scale2, codes, 1, block, there, at, mask, state)
        p, m, v, change = _adam(p, m, v, g, row, fma_addcmul, fma_lerp)
        _store_moment(v, moment2, scale2, codes, 1, words, block, there, at, mask, state)
    elif algorithm == SGD:
        if moment1 is not None:
            m, g = _sgd_momentum(m, g, row, fma_add)
        change = tl.load(row + 9) * g
        p = _sum(p, tl.load(row + 9), g, fma_add)
    else:
        p, m, change = _lion(p, m, g, row, fma_add)
    if moment1 is not None:
        _store_moment(m, moment1, scale1, codes, 0, words, block, there, at, mask, state)
    if wanted is not None:
        tl.store(wanted + at, change, mask=mask)
    _store_master(p, storage, master, at, mask, master_kind)


@triton.jit
def squares(data, out, numel, tile: tl.constexpr):
    """Run the sums of squares of native.cpp on `tile` blocks: 16 lanes, added up by halves."""
    block = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    lane = block[:, None] * BLOCK + tl.arange(0, LANES)[None, :]
    sums = tl.zeros((tile, LANES), tl.float64)
    for place in tl.static_range(0, BLOCK, LANES):
        wide = load_wide(data, lane + place, lane + place < numel).to(tl.float64)
        sums += wide * wide  # the square of an fp32 value is exact
    # A sum of two has one order.
    sums = tl.sum(tl.reshape(sums, (tile, 2, 8)), 1)
    sums = tl.sum(tl.reshape(sums, (tile, 2, 4)), 1)
    sums = tl.sum(tl.reshape(sums, (tile, 2, 2)), 1)
    tl.store(out + block, tl.sum(sums, 1), mask=block * BLOCK < numel)


@triton.jit
def digits(
    sums, out, count, places: tl.constexpr, lowest: tl.constexpr, copies: tl.constexpr, tile: tl.constexpr
):
    """Add the bits of fp64 sums of squares to int64 digits as `reference_digits` does. `out` has `copies` of
    each place, for the caller to add up, because additions to one address wait for each other."""
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    mask = at < count
    bits = tl.load(sums + at, mask=mask, other=0)
    exponent = ((bits >> 52) & 0x7FF).to(tl.int32)
    is_odd = exponent == 0x7FF
    place = tl.maximum(exponent, 1) - 1075 - lowest
    mantissa = (bits & 0xFFFFFFFFFFFFF) + ((exponent > 0).to(tl.int64) << 52)
    mantissa = tl.where(is_odd | (place < 0), 0, mantissa)
    place = tl.maximum(place, 0)
    shift = (place & 31).to(tl.int64)
    low, high = (mantissa & 0xFFFFFFFF) << shift, (mantissa >> 32) << shift
    to = out + tl.minimum(place >> 5, places - 3) * copies + at % copies
    _add_where_any(to, low & 0xFFFFFFFF, mask)
    _add_where_any(to + copies, (low >> 32) + (high & 0xFFFFFFFF), mask)
    _add_where_any(to + 2 * copies, high >> 32, mask)
    _add_where_any(out + places * copies + at % copies, is_odd.to(tl.int64), mask)


@triton.jit
def _add_where_any(to, number, mask):
    tl.atomic_add(to, number, mask=mask & (number != 0), sem="relaxed")


@triton.jit
def _narrowed(total, narrow: tl.constexpr):
    if narrow == BF16_SUM:
        return bf16_even(total)
    elif narrow == FP16_SUM:
        return total.to(tl.float16)
    else:
        return total


@triton.jit
def _rounded(total, narrow: tl.constexpr):
    if narrow == BF16_SUM:
        return wide_bf16(bf16_even(total))
    else:
        return _narrowed(total, narrow).to(tl.float32)


@triton.jit
def sums(parts, out, numel, count, narrow: tl.constexpr, tile: tl.constexpr):
    """Add `count` consecutive parts of `numel` elements in their order; round each addition to the 16 bits of
    `narrow`, if the sum has such a dtype."""
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    mask = at < numel
    total = load_wide(parts, at, mask)
    here = at
    for _ in range(1, count):
        here += numel
        total = _rounded(total + load_wide(parts, here, mask), narrow)
    tl.store(out + at, _narrowed(total, narrow), mask=mask)


@triton.jit
def tree_sums(
    parts, out, numel, count: tl.constexpr, height: tl.constexpr, narrow: tl.constexpr, tile: tl.constexpr
):
    """Add up the parts as `sums` does, but by the binary tree over them, of `height` levels."""
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    mask = at < numel
    total = _node(parts, at, at * 0 + numel, mask, 0, height, count, narrow)
    tl.store(out + at, _narrowed(total, narrow), mask=mask)


@triton.jit
def _node(
    parts, at, numel, mask, first: tl.constexpr, height: tl.constexpr, count: tl.constexpr, kind: tl.constexpr
):
    """Return the sum of a node of the tree, from part `first` on. A missing half is skipped."""
    if height == 0:
        return load_wide(parts, at + numel * first, mask)
    else:
        half: tl.constexpr = 1 << (height - 1)
        total = _node(parts, at, numel, mask, first, height - 1, count, kind)
        if first + half < count:
            right = _node(parts, at, numel, mask, first + half, height - 1, count, kind)
            total = _rounded(total + right, kind)
        return total


@triton.jit
def prints(words, out, count, tile: tl.constexpr):
    """Write the prints of `tile` blocks of 128 int32 words, as `reference_prints` defines them."""
    block = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    lane = tl.arange(0, LANES)[None, :]
    there = block[:, None] < count
    lanes = (block[:, None] + lane * 0).to(tl.uint32)
    power = (lane * 0 + 1).to(tl.uint64)
    for step in tl.static_range(8):
        word = tl.load(words + block[:, None] * 8 * LANES + step * LANES + lane, mask=there, other=0)
        lanes = (lanes ^ word.to(tl.uint32, bitcast=True)) * PRINT_STEP
        lanes = (lanes << PRINT_TURN) | (lanes >> (32 - PRINT_TURN))
    for following in tl.static_range(1, LANES):  # a lane is multiplied once for each that follows it
        power = tl.where(lane < following, power * PRINT_FOLD, power)
    total = tl.sum(lanes.to(tl.uint64) * power, 1)
    tl.store(out + block, total.to(tl.int64, bitcast=True), mask=block < count)
