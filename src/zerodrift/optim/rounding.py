"""Stochastic rounding to bf16, by random bits that depend on nothing but what is rounded.

A value is rounded up with the probability of its distance from below, so its mean is kept where nearest
rounding would keep nothing: a bf16 moment that decays by less than half an ulp a step still decays. The 16
random bits of an element come from a hash of (seed, parameter, element, step), not from a generator with a
state: every stage, world size, slicing, thread and resumed run draws the same.

The hash works in three stages, so that the cheap one is the one paid per element: a parameter's key mixes
its name and the seed; a block's key mixes the number of the block within its parameter; per step and
element, 32 bits are mixed from the block's key, the step and the place in the block. The low half of those
serves the first moment, the high half the second.

Invariant: plain wrapping integer arithmetic, so PyTorch and compiled code draw the same bits on every
machine. The known answers in the tests never change: a resumed run depends on them.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.optim.split import NAN_HIGH

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_LOW = (1 << 32) - 1


def parameter_key(name: str, seed: int = 0) -> int:
    """The 64-bit key of a parameter, from its name and the run's seed."""
    text = f"{seed}:{name}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def step_key(step: int) -> int:
    """The part of a key that changes with every optimizer step, as a signed 64-bit integer."""
    return _signed(_mix(((step + 1) * _GOLDEN) & _WORD))


def block_keys(parameter: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The keys of blocks [first, first + count) of a parameter: int64, one per 256 elements.

    They do not change from step to step: an engine makes them once for its slice and keeps them.
    """
    number = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    return _mix_tensor(number * _signed(_GOLDEN) + _signed(parameter))


def random_words(keys: Tensor, step: int) -> Tensor:
    """32 random bits for every element of the given blocks: int64 in [0, 2^32), one row per block."""
    mixed = _mix_tensor(keys ^ step_key(step))
    low, high = (mixed & _LOW)[:, None], (_shift(mixed, 32))[:, None]
    place = torch.arange(BLOCK, dtype=torch.int64, device=keys.device)[None, :]
    # Everything is kept below 2^32 after each step, so a product of two such numbers, wrapped to 64 bits,
    # has the same low 32 bits as a 32-bit product.
    word = (place * 0x9E3779B9 + low) & _LOW
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _LOW
    word = (((word ^ (word >> 15)) + high) * 0xD35A2D97) & _LOW
    return word ^ (word >> 15)


def round_stochastic(values: Tensor, words: Tensor) -> Tensor:
    """fp32 -> bf16, up or down by the low 16 bits of `words`. Infinities stay, NaNs become the quiet one."""
    bits = values.contiguous().view(torch.int32)
    # Adding to the bits moves away from zero for both signs. Only a NaN could wrap, and is replaced.
    moved = bits + (words & 0xFFFF).to(torch.int32)
    rounded = moved.bitwise_right_shift_(16).to(torch.int16).masked_fill_(values.isnan(), NAN_HIGH)
    return rounded.view(torch.bfloat16)


def _mix(word: int) -> int:
    """The finalizer of SplitMix64: every input bit reaches every output bit."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _mix_tensor(words: Tensor) -> Tensor:
    """`_mix` on int64, whose multiplication wraps."""
    words = (words ^ _shift(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shift(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shift(words, 31)


def _shift(words: Tensor, count: int) -> Tensor:
    """A right shift that brings in zeros, which int64 does not have."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    return word - (1 << 64) if word >> 63 else word
