"""Prints of blocks are equal by both paths, and differ after every change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zerodrift.kernels.digests import BYTES, prints, reference_prints

WORDS = BYTES // 4


def some(blocks: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    count = blocks * BYTES // dtype.itemsize
    return torch.randn(count, generator=torch.Generator().manual_seed(blocks)).to(dtype)


@pytest.mark.parametrize("blocks", [0, 1, 3, 100])
def test_both_paths_have_the_same_prints(blocks: int) -> None:
    flat = some(blocks)
    assert torch.equal(prints(flat), reference_prints(flat.view(torch.int32)))


def test_the_end_is_filled_up_with_zeros() -> None:
    flat = some()
    flat[-5:] = 0.0
    assert torch.equal(prints(flat[:-5]), prints(flat))


def test_every_word_counts() -> None:
    flat = some(1)
    before = prints(flat)
    for word in range(WORDS):
        for bit in (0, 15, 31):
            changed = flat.clone().view(torch.int32)
            changed[word] ^= -(1 << 31) if bit == 31 else 1 << bit
            assert not torch.equal(prints(changed), before), (word, bit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "write",
    [
        Tensor.neg,
        Tensor.abs,
        torch.zeros_like,
        lambda x: x * 2,
        lambda x: x / 4,
        lambda x: x.flip(0),
        lambda x: x.roll(1),
        lambda x: x.roll(BYTES // x.itemsize),
        lambda x: x.view(2, -1).flip(0).reshape(-1),
    ],
)
def test_every_block_of_a_tensor_that_was_written_has_another_print(
    write: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    flat = some(dtype=dtype)
    assert bool((prints(write(flat)) != prints(flat)).all())


def test_two_signs_do_not_cancel() -> None:
    flat = some(1)
    before = prints(flat)
    for first in range(16):
        for second in range(first + 16, WORDS, 16):
            changed = flat.clone()
            changed[[first, second]] *= -1
            assert not torch.equal(prints(changed), before), (first, second)
