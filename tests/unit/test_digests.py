"""Digests and prints of blocks: equal by both paths, different after every change; digests are additive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.engine.digest import tensor_digest
from zerodrift.kernels.digests import (
    BYTES,
    block_digests,
    prints,
    reference_block_digests,
    reference_prints,
    weights_of_places,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64, torch.bool]


def some(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 3).to(dtype)


def by_definition(flat: Tensor, first: int) -> list[int]:
    """Compute the digests with Python's integers."""
    size = flat.itemsize
    data = flat.view(torch.uint8).tolist() if flat.numel() else []
    words = [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]
    weights = weights_of_places().tolist()
    sums = [0] * -(-(first + len(words)) // BLOCK)
    for place, word in enumerate(words, first):
        sums[place // BLOCK] += word * weights[place % BLOCK]
    return [total & (1 << 64) - 1 for total in sums]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("numel", "first"), [(0, 0), (1, 255), (600, 200), (3, 254)])
def test_both_paths_are_the_definition(dtype: torch.dtype, numel: int, first: int) -> None:
    flat = some(numel, dtype)
    sums = block_digests(flat, first)
    assert [total & (1 << 64) - 1 for total in sums.tolist()] == by_definition(flat, first)
    assert torch.equal(sums, reference_block_digests(flat, first, torch.empty_like(sums)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_slices_add_up(dtype: torch.dtype) -> None:
    flat = some(5 * BLOCK + 7, dtype)
    whole = block_digests(flat)
    for cut in (1, 100, BLOCK, 3 * BLOCK + 5):
        parts = torch.zeros_like(whole)
        parts[: -(-cut // BLOCK)] += block_digests(flat[:cut])
        parts[cut // BLOCK :] += block_digests(flat[cut:], cut % BLOCK)
        assert torch.equal(parts, whole)


def test_a_long_tensor_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = some(3000)
    whole = block_digests(flat, 9)
    monkeypatch.setattr("zerodrift.kernels.digests._AT_ONCE", BLOCK)
    assert torch.equal(reference_block_digests(flat, 9, torch.empty_like(whole)), whole)


def test_every_bit_of_every_element_counts() -> None:
    flat = some(BLOCK)
    before = block_digests(flat)
    for place in range(0, BLOCK, 5):
        for bit in range(32):
            changed = flat.clone().view(torch.int32)
            changed[place] ^= -(1 << 31) if bit == 31 else 1 << bit
            assert not torch.equal(block_digests(changed.view(torch.float32)), before)


def test_weights_are_odd_and_never_change() -> None:
    weights = weights_of_places()
    assert bool((weights % 2 != 0).all()) and len(set(weights.tolist())) == BLOCK
    assert weights[[0, 1, 255]].tolist() == KNOWN
    assert block_digests(torch.arange(300, dtype=torch.float32)).tolist() == KNOWN_SUMS


KNOWN = [480509895710627439, -7313006754444355091, 8524369356908854965]
KNOWN_SUMS = [-5955328792716509184, 2974734815035719680]


def test_of_a_whole_tensor_depends_on_every_bit_its_name_and_its_dtype() -> None:
    value = torch.rand(300, 3, generator=torch.Generator().manual_seed(0))
    digest = tensor_digest("a", value)
    assert digest == tensor_digest("a", value.t().contiguous().t()) == "3f558ee0b841284b"
    changed = value.clone()
    changed[299, 2] = torch.nextafter(changed[299, 2], torch.tensor(2.0))
    others = [tensor_digest("b", value), tensor_digest("a", value.double()), tensor_digest("a", changed)]
    others += [tensor_digest("a", value.bfloat16()), tensor_digest("a", value.flip(0))]
    assert len({digest, *others}) == 6


# --- prints ---------------------------------------------------------------------------------------------


def words(blocks: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return some(blocks * BYTES // dtype.itemsize, dtype)


@pytest.mark.parametrize("blocks", [0, 1, 3, 100])
def test_both_paths_have_the_same_prints(blocks: int) -> None:
    flat = words(blocks)
    assert torch.equal(prints(flat), reference_prints(flat.view(torch.int32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "write",
    [
        Tensor.neg,
        torch.zeros_like,
        lambda x: x / 4,
        lambda x: x.flip(0),
        lambda x: x.roll(BYTES // x.itemsize),
    ],
)
def test_every_block_of_a_tensor_that_was_written_has_another_print(
    write: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    flat = words(dtype=dtype)
    assert bool((prints(write(flat)) != prints(flat)).all())
