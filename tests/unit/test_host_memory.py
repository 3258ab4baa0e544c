"""Memory of the host: of resting tensors, of the buffers of a step, and pages that are touched before use."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from zerodrift.kernels import HostBuffers
from zerodrift.kernels.storage import LEAST, resting_zeros
from zerodrift.weights.reader import SafetensorsReader

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool]
)
@pytest.mark.parametrize("shape", [0, 3, LEAST + 5, (2, LEAST)])
def test_it_is_what_zeros_are(shape: int | tuple[int, ...], dtype: torch.dtype) -> None:
    found, wanted = resting_zeros(shape, dtype, CPU), torch.zeros(shape, dtype=dtype)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert (found.shape, found.dtype) == (wanted.shape, dtype) and found.is_contiguous()
    assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()


def test_what_is_there_stays() -> None:
    """Values at the edges stay too, on pages that are shared with neighbours."""
    flat = torch.arange(3 * mmap.PAGESIZE, dtype=torch.int32)
    SafetensorsReader()._create_pages(flat[100:-100])
    assert torch.equal(flat, torch.arange(3 * mmap.PAGESIZE, dtype=torch.int32))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere buffers are torch's")
def test_a_buffer_that_is_given_back_is_the_next_one_that_fits_and_never_that_of_two() -> None:
    buffers, count = HostBuffers(), 1 << 20
    first = buffers.take(2 * count, torch.float32)
    address = first.data_ptr()
    buffers.give(first)
    del first
    buffers.rest()
    smaller = buffers.take(count, torch.bfloat16)
    assert smaller.data_ptr() == address and smaller.shape == (count,) and smaller.dtype is torch.bfloat16
    assert buffers.take(count, torch.float32).data_ptr() != address
    buffers.give(smaller)
    larger = buffers.take(4 * count, torch.float32).fill_(1.0)
    assert float(larger.sum()) == 4 * count
