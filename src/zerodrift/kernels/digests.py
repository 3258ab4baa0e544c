"""Checksums of flat tensors by block: prints, which show where memory was written, and digests of values.

A print is made of 32-bit words of memory. Word i of a block of 128 goes to lane i % 16, which applies an
exclusive or, multiplies by an odd number and rotates. Each step is invertible, so a block with one changed
word never keeps its print; several changes keep it about once in 2^32. Without the rotation, two changes of a
sign would cancel. Lanes start from the block's number, so swapped blocks differ too, and are folded into 64
bits.

A digest is the sum of the bits of 256 elements, each an integer times an odd 64-bit weight of its place,
modulo 2^64. So the parts of a block, cut anywhere, add up to the digest of the block, and an element that
changed by any number of bits changes the sum. `engine/digest.py` combines them into one number for a run's
whole state.

Invariants: a print depends only on the bytes, not on the device or the implementation. The known answers of
digests in the tests never change, because runs record them.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.kernels import device, native

BYTES = 512
"""Size of a block of a print."""

_LANES, _STEP, _TURN, _FOLD = 16, 0x9E3779B1, 15, 0x9E3779B97F4A7C15
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 20
"""Elements per call of the reference, each of which takes 8 bytes."""


def prints(flat: Tensor) -> Tensor:
    """Return the print of each 512 bytes of a flat tensor, padded with zeros. Shape [blocks], int64."""
    data = flat.detach().view(torch.uint8)
    over = -data.numel() % BYTES
    words = (torch.cat([data, data.new_zeros(over)]) if over else data).view(torch.int32)
    out = torch.empty(words.numel() * 4 // BYTES, dtype=torch.int64, device=flat.device)
    if out.numel() and device.works(flat.device):
        return device.prints(words, out)
    built = native.library() if flat.device.type == "cpu" else None
    if built is None:
        return out.copy_(reference_prints(words))
    built.prints(out.numel(), words.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out


def reference_prints(words: Tensor) -> Tensor:
    """Define `prints` in plain torch, on whole blocks of int32 words. Integers wrap in torch as in C."""
    steps = words.view(-1, BYTES // 4 // _LANES, _LANES)
    lanes = torch.arange(len(steps), dtype=torch.int32, device=words.device)[:, None].repeat(1, _LANES)
    for step in range(steps.shape[1]):
        lanes.bitwise_xor_(steps[:, step]).mul_(_STEP - (1 << 32))
        lanes = (lanes << _TURN) | ((lanes >> (32 - _TURN)) & ((1 << _TURN) - 1))
    sums = torch.zeros(len(steps), dtype=torch.int64, device=words.device)
    for lane in range(_LANES):
        sums.mul_(_FOLD - (1 << 64)).add_(lanes[:, lane].long() & 0xFFFFFFFF)
    return sums


def block_digests(flat: Tensor, first: int = 0) -> Tensor:
    """Return the digests of a flat contiguous tensor whose first element has place `first` in its block.

    Shape [blocks], int64.
    """
    flat = flat.detach()
    blocks = -(-(first + flat.numel()) // BLOCK)
    out = torch.empty(blocks, dtype=torch.int64, device=flat.device)
    built = native.library() if flat.device.type == "cpu" and flat.itemsize in (2, 4) else None
    if built is None:
        return reference_block_digests(flat, first, out)
    addresses = weights_of_places().data_ptr(), out.data_ptr()
    built.digests(flat.numel(), flat.data_ptr(), flat.itemsize, first, *addresses, torch.get_num_threads())
    return out


def reference_block_digests(flat: Tensor, first: int, out: Tensor) -> Tensor:
    """Define `block_digests` in plain torch, where integers wrap as in C."""
    weights = weights_of_places().to(flat.device)
    words = flat.view(_WORDS[flat.itemsize])
    mask = (1 << 8 * flat.itemsize) - 1 if flat.itemsize < 8 else -1
    for start in range(0, out.numel() * BLOCK, _AT_ONCE):
        stop = min(start + _AT_ONCE, out.numel() * BLOCK)
        low, high = max(start - first, 0), min(stop - first, flat.numel())
        wide = weights.new_zeros(stop - start)
        wide[low + first - start : high + first - start] = words[low:high].long() & mask
        out[start // BLOCK : stop // BLOCK] = (wide.view(-1, BLOCK) * weights).sum(1)
    return out


@functools.cache
def weights_of_places() -> Tensor:
    """Return the weights of the places: odd, and otherwise without a pattern. Shape [256], int64."""
    texts = (f"place {place}".encode() for place in range(BLOCK))
    words = (
        int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True) for text in texts
    )
    return torch.tensor([word | 1 for word in words], dtype=torch.int64)
