"""What each block of 256 elements adds to a digest: a sum of its bits, each times the weight of its place.

The bits of an element are read as a whole number and multiplied by an odd 64-bit number that depends on its
place in the block; products are added modulo 2^64. So the parts of a block that was cut anywhere add up to
what the block has, and an element that changed by any number of bits changes the sum.

`engine/digest.py` makes one number of a run's whole state from these.

Invariant: the known answers in the tests never change, because runs record what is made of them.
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
"""Elements, each of which takes 8 bytes on its way."""


def block_digests(flat: Tensor, first: int = 0) -> Tensor:
    """`[blocks]`, int64, of a flat contiguous tensor whose first element has place `first` in its block."""
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
    """The definition of `block_digests`. Integers wrap in torch as they do in C."""
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
    """`[256]`, int64: odd, and otherwise without a pattern."""
    texts = (f"place {place}".encode() for place in range(BLOCK))
    words = (
        int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True) for text in texts
    )
    return torch.tensor([word | 1 for word in words], dtype=torch.int64)
