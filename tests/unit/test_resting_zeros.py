"""Memory of what rests is mapped by itself: zero, of any shape and dtype, and gone with its tensor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from zerodrift.kernels.storage import LEAST, resting_zeros

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


@pytest.mark.skipif(sys.platform != "linux", reason="memory maps of Linux")
def test_it_lies_apart_and_goes_with_its_tensor() -> None:
    found = resting_zeros(4 * LEAST, torch.uint8, CPU)
    address = found.data_ptr()
    part = found[:10].add_(1)
    assert is_mapped(address)
    del found
    assert is_mapped(address) and part.eq(1).all()  # as long as somebody has a view
    del part
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    """Whether this process has memory there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.partition(" ")[0].partition("-") for line in lines)
    return any(int(start, 16) <= address < int(end, 16) for start, _, end in spans)
