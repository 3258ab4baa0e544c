"""Random bits for rounding: a word for each element that depends on its place, not on earlier draws.

The bits come from a hash of (seed, parameter, element, step), not from a generator with a state: every stage,
world size, slicing, thread and resumed run draws the same. A parameter's key mixes its name and the seed; a
block's key mixes the number of the block within its parameter; per step and element, 32 bits are mixed from
the block's key, the step and the place in the block.

Invariant: the words are plain wrapping integer arithmetic, the same in PyTorch, compiled code and programs on
every machine. The known answers in the tests never change: a resumed run depends on them.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_LOW = (1 << 32) - 1


def parameter_key(name: str, seed: int = 0) -> int:
    """Return the 64-bit key of a parameter, from its name and the run's seed."""
    text = f"{seed}:{name}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def step_key(step: int) -> int:
    """Return the part of a key that changes with every optimizer step."""
    return _signed(mix_bits(step * _GOLDEN))


def mix_bits(value: int) -> int:
    """Return the word of SplitMix64 for a state: every bit of the state changes half of the 64 bits."""
    word = (value + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def block_keys(parameter: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the keys of blocks [first, first + count) of a parameter: int64, one per 256 elements.

    The keys do not change from step to step, so an engine keeps those of its slice.
    """
    number = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device)
    return _mix(number * _signed(_GOLDEN) + _signed(parameter))


def random_words(keys: Tensor, step: int) -> Tensor:
    """Return 32 random bits per element of the given blocks: int64 in [0, 2^32), one row per block."""
    mixed = _mix(keys ^ step_key(step))
    low, high = (mixed & _LOW)[:, None], _shift(mixed, 32)[:, None]
    place = torch.arange(BLOCK, dtype=torch.int64, device=keys.device)[None, :]
    # Every value is below 2^32 after each step, so a product of two such numbers, wrapped to 64 bits,
    # has the same low 32 bits as a 32-bit product.
    word = (place * 0x9E3779B9 + low) & _LOW
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & _LOW
    word = (((word ^ (word >> 15)) + high) * 0xD35A2D97) & _LOW
    return word ^ (word >> 15)


def _mix(words: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64: every input bit reaches every output bit."""
    words = (words ^ _shift(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shift(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shift(words, 31)


def _shift(words: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros, which int64 does not do."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    return word - (1 << 64) if word >> 63 else word
