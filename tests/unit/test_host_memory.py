"""Memory of the host: resting tensors have mappings of their own, and pages can be touched before use."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from zerodrift.kernels.storage import LEAST, resting_zeros
from zerodrift.weights.reader import Pages

CPU = torch.device("cpu")
SIZE = 64 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool]
)
@pytest.mark.parametrize("shape", [0, 3, LEAST + 5, (2, LEAST)])
def test_it_is_what_zeros_are(shape: int | tuple[int, ...], dtype: torch.dtype) -> None:
    found, wanted = resting_zeros(shape, dtype, CPU), torch.zeros(shape, dtype=dtype)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    assert (found.shape, found.dtype) == (wanted.shape, dtype) and found.is_contiguous()
    assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()


@linux
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
    """Return whether this process has memory at an address."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.partition(" ")[0].partition("-") for line in lines)
    return any(int(start, 16) <= address < int(end, 16) for start, _, end in spans)


# --- fresh pages ------------------------------------------------------------------------------------------


def resident(tensor: torch.Tensor) -> int:
    """Return the resident bytes of a tensor's mapping."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(place, 16) for place in mapping.groups())
            inside = first <= tensor.data_ptr() < end
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


@linux
def test_pages_are_there_without_a_write() -> None:
    pages, flat = Pages(), torch.empty(SIZE, dtype=torch.uint8)
    before = resident(flat)
    pages.ready(flat)
    if pages._ask is None:
        pytest.skip("this kernel does not know the request")
    assert resident(flat) - before > 0.9 * SIZE


def test_what_is_there_stays() -> None:
    """Values at the edges stay too, on pages that are shared with neighbours."""
    flat = torch.arange(3 * mmap.PAGESIZE, dtype=torch.int32)
    Pages().ready(flat[100:-100])
    assert torch.equal(flat, torch.arange(3 * mmap.PAGESIZE, dtype=torch.int32))


def test_nothing_happens_where_the_system_refuses() -> None:
    pages, asked = Pages(), []
    pages._ask = lambda *args: asked.append(args) or -1
    for _ in range(2):
        pages.ready(torch.zeros(10))
    assert len(asked) == 1
    Pages().ready(torch.empty(0))
