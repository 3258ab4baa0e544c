"""Host memory that the buffers of a step take turns in."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from zerodrift.kernels import HostBuffers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere buffers are torch's")

LARGE = 1 << 20  # elements


def test_a_buffer_that_is_given_back_is_the_next_one() -> None:
    buffers = HostBuffers()
    first = buffers.take(2 * LARGE, torch.float32)
    first.fill_(3.0)
    address = first.data_ptr()
    buffers.give(first)
    del first
    buffers.rest()
    smaller = buffers.take(LARGE, torch.bfloat16)
    assert smaller.data_ptr() == address and smaller.shape == (LARGE,) and smaller.dtype is torch.bfloat16
    assert buffers.take(LARGE, torch.float32).data_ptr() != address
    buffers.give(smaller)
    larger = buffers.take(4 * LARGE, torch.float32)
    larger.fill_(1.0)
    assert float(larger.sum()) == 4 * LARGE and not buffers._free  # the one that was too small is gone


def test_what_is_dropped_is_forgotten() -> None:
    buffers = HostBuffers()
    part = buffers.take(LARGE, torch.float32)[:5]
    assert len(buffers._lent) == 1  # a view keeps the memory
    del part
    assert not buffers._lent
    buffers.give(torch.empty(LARGE))
    assert not buffers._free


def test_a_system_that_cannot_take_pages_back_later_gets_them_now(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = HostBuffers()
    buffers.give(buffers.take(LARGE, torch.float32))
    monkeypatch.delattr(mmap, "MADV_FREE")
    buffers.rest()
    assert not buffers._free
