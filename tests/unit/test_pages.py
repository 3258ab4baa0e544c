"""Fresh memory that is made before it is written: its pages are there, and what is in it stays."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from zerodrift.weights.reader import Pages

SIZE = 64 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that a tensor lies in which are in memory."""
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
    """Also at the edges, where the pages that are asked for have neighbours' values."""
    flat = torch.arange(3 * mmap.PAGESIZE, dtype=torch.int32)
    Pages().ready(flat[100:-100])
    assert torch.equal(flat, torch.arange(3 * mmap.PAGESIZE, dtype=torch.int32))


def test_nothing_happens_where_the_system_refuses() -> None:
    pages, asked = Pages(), []
    pages._ask = lambda *args: asked.append(args) or -1
    for _ in range(2):
        pages.ready(torch.zeros(10))
    assert len(asked) == 1


def test_nothing_is_asked_for_nothing() -> None:
    Pages().ready(torch.empty(0))
