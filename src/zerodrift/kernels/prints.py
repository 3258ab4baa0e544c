"""Fingerprints of a flat buffer by block, which show where the buffer was written.

Bytes are read as 32-bit words. Word i of a block of 128 goes to lane i % 16, which applies an exclusive or,
multiplies by an odd number and rotates. Each step is invertible, so a block with one changed word never keeps
its print; several changes keep it about once in 2^32. Without the rotation, two changes of a sign would
cancel. Lanes start from the block's number, so swapped blocks differ too, and are folded into 64 bits.

Invariant: the print of a buffer depends only on its bytes, not on the device or the implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerodrift.kernels import native

BYTES = 512
"""Size of a block."""

_LANES = 16
_STEP = 0x9E3779B1
_TURN = 15
_FOLD = 0x9E3779B97F4A7C15


def prints(flat: Tensor) -> Tensor:
    """Return the print of each 512 bytes of a flat tensor, padded with zeros. Shape [blocks], int64."""
    words = _words(flat)
    out = torch.empty(words.numel() * 4 // BYTES, dtype=torch.int64, device=flat.device)
    built = native.library() if flat.device.type == "cpu" else None
    if built is None:
        return out.copy_(reference_prints(words))
    built.prints(out.numel(), words.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out


def _words(flat: Tensor) -> Tensor:
    data = flat.detach().view(torch.uint8)
    over = -data.numel() % BYTES
    if over:
        data = torch.cat([data, data.new_zeros(over)])
    return data.view(torch.int32)


def reference_prints(words: Tensor) -> Tensor:
    """Define `prints` in plain torch, on whole blocks of int32 words. Integers wrap in torch as in C."""
    steps = words.view(-1, BYTES // 4 // _LANES, _LANES)
    lanes = torch.arange(len(steps), dtype=torch.int32, device=words.device)[:, None].repeat(1, _LANES)
    for step in range(steps.shape[1]):
        lanes.bitwise_xor_(steps[:, step]).mul_(_signed(_STEP, 32))
        lanes = (lanes << _TURN) | ((lanes >> (32 - _TURN)) & ((1 << _TURN) - 1))
    sums = torch.zeros(len(steps), dtype=torch.int64, device=words.device)
    for lane in range(_LANES):
        sums.mul_(_signed(_FOLD, 64)).add_(lanes[:, lane].long() & 0xFFFFFFFF)
    return sums


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
