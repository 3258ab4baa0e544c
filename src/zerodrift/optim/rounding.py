"""Conversions of fp32 values to 16 bits: rounded stochastically, or split in two halves without loss.

Stochastic rounding goes up with the probability of a value's distance from below, so the mean is kept where
nearest rounding would keep nothing: a bf16 moment that decays by less than half an ulp a step still decays.
The 16 random bits of an element come from a hash of (seed, parameter, element, step), not from a generator
with a state: every stage, world size, slicing, thread and resumed run draws the same. A parameter's key mixes
its name and the seed; a block's key mixes the number of the block within its parameter; per step and
element, 32 bits are mixed from the block's key, the step and the place in the block. Their low half serves
the first moment, their high half the second.

A split value is a bf16 value and 16 more bits. `high` is what the model sees: the value rounded to bf16,
nearest, ties away from zero. `low` is the signed rest, in units of the last of the 32 bits. Rounding this way
is what makes 16 bits enough: the rest always lies in [-2^15, 2^15), so `join` is one shift and one addition.
Rounding ties to even could not be undone. A NaN is stored as (0x7FC0, 0): other NaN patterns would carry into
the sign and show as -0.0. Values beyond the largest bf16 show as infinity in `high`, and still join exactly.

Invariant: `join(*split(x))` has the bits of x, for all 2^32 of them but NaNs, which join to one quiet NaN;
and random bits are plain wrapping integer arithmetic, the same in PyTorch and compiled code on every machine.
The known answers in the tests never change: a resumed run depends on them.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK

NAN_HIGH = 0x7FC0
"""The bits of the one NaN that `high` ever holds."""

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_LOW = (1 << 32) - 1


def parameter_key(name: str, seed: int = 0) -> int:
    """Return the 64-bit key of a parameter, from its name and the run's seed."""
    text = f"{seed}:{name}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def step_key(step: int) -> int:
    """Return the part of a key that changes with every optimizer step: `_mix` of a Python integer."""
    word = ((step + 1) * _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return _signed(word ^ (word >> 31))


def block_keys(parameter: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the keys of blocks [first, first + count) of a parameter: int64, one per 256 elements.

    They do not change from step to step, so an engine keeps those of its slice.
    """
    number = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    return _mix(number * _signed(_GOLDEN) + _signed(parameter))


def random_words(keys: Tensor, step: int) -> Tensor:
    """Return 32 random bits per element of the given blocks: int64 in [0, 2^32), one row per block."""
    mixed = _mix(keys ^ step_key(step))
    low, high = (mixed & _LOW)[:, None], _shift(mixed, 32)[:, None]
    place = torch.arange(BLOCK, dtype=torch.int64, device=keys.device)[None, :]
    # Everything is kept below 2^32 after each step, so a product of two such numbers, wrapped to 64 bits,
    # has the same low 32 bits as a 32-bit product.
    word = (place * 0x9E3779B9 + low) & _LOW
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _LOW
    word = (((word ^ (word >> 15)) + high) * 0xD35A2D97) & _LOW
    return word ^ (word >> 15)


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


def _mix(words: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64: every input bit reaches every output bit."""
    words = (words ^ _shift(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shift(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shift(words, 31)


def _shift(words: Tensor, count: int) -> Tensor:
    """Shift right and bring in zeros, which int64 does not do."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return word - (1 << 64) if word >> 63 else word
