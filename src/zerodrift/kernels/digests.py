"""Digests of blocks of 256 elements: the sum of the elements' bits, each times the weight of its place.

The bits of an element are an integer, which is multiplied by an odd 64-bit weight that depends on the place
in the block. Products are added modulo 2^64. So the parts of a block, cut anywhere, add up to the digest of
the block, and an element that changed by any number of bits changes the sum.

`engine/digest.py` combines these digests into one number for a run's whole state.

Invariant: the known answers in the tests never change, because runs record digests.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.kernels import native

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 20
"""Elements per call of the reference, each of which takes 8 bytes."""


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
    weights = weights_of_places()
    threads = torch.get_num_threads()
    built.digests(
        flat.numel(), flat.data_ptr(), flat.itemsize, first, weights.data_ptr(), out.data_ptr(), threads
    )
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
