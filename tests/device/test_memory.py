"""Memory of a device: the model of CUDA's caching allocator, and the peak of a plan for 8B parameters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.device import caching
from tests.device.build import needs_device
from tests.device.caching import (
    LARGE_BUFFER,
    MIN_BLOCK,
    ROUND_LARGE,
    SMALL_BUFFER,
    CachingAllocator,
)
from tests.device.ranks import on_devices

BENCH = Path(__file__).parents[2] / "bench"
MIB = 1 << 20
ACTIVATIONS = 32 * MIB
"""Bound for the activations of 16 tokens, most of them logits in fp32."""


def test_sizes_are_those_of_torch() -> None:
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    found = {name: int(size) for name, size in re.findall(r"size_t (k\w+) = (\d+);", header.read_text())}
    ours = {
        "kMinBlockSize": caching.MIN_BLOCK,
        "kSmallSize": caching.SMALL,
        "kSmallBuffer": caching.SMALL_BUFFER,
        "kMinLargeAlloc": caching.MIN_LARGE,
        "kRoundLarge": caching.ROUND_LARGE,
    }
    assert ours.items() <= found.items()


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([513, MIB], 2 * MIN_BLOCK + MIB, SMALL_BUFFER),
        ([MIB + 1], MIB + MIN_BLOCK, LARGE_BUFFER),
        ([19 * MIB // 2, 11 * MIB], 43 * MIB // 2, LARGE_BUFFER + 12 * MIB),
        ([11 * MIB], 12 * MIB, 12 * MIB),  # what is left of a segment is too little to be split off
        ([21 * MIB + 1], 22 * MIB, 11 * ROUND_LARGE),
    ],
)
def test_what_is_reserved(sizes: list[int], allocated: int, reserved: int) -> None:
    memory = CachingAllocator()
    for number, size in enumerate(sizes):
        memory.allocate(str(number), size)
    memory.require_whole()
    assert (memory.allocated, memory.reserved) == (allocated, reserved)


def test_blocks_are_used_again_on_their_stream_and_merged() -> None:
    memory = CachingAllocator()
    for name in "abc":
        memory.allocate(name, 4 * MIB)
    memory.free("a")
    memory.free("b")
    memory.allocate("both", 8 * MIB)
    assert memory.reserved == LARGE_BUFFER
    memory.free("both")
    memory.allocate("elsewhere", 4 * MIB, stream=1)
    assert memory.reserved == 2 * LARGE_BUFFER
    memory.allocate("best", 8 * MIB)
    assert memory.reserved == 2 * LARGE_BUFFER and memory.usage.reuse == pytest.approx(4 / 6)


# --- Llama-3-8B ----------------------------------------------------------------------------------------


def _peaks(device: torch.device) -> tuple[int, int]:
    """Return the planned and the measured peak of stage 3 on 8 ranks."""
    sys.path.insert(0, str(BENCH))
    import memory as bench

    entries, bill = bench.run("8B", 8, 3, 16)
    played = CachingAllocator()
    played.play(entries)
    return bill.peak.total, played.usage.allocated


@needs_device
@pytest.mark.long
def test_the_plan_of_a_large_model_has_its_peak() -> None:
    ((planned, used),) = on_devices(_peaks, 1, timeout=280)
    assert used - ACTIVATIONS < planned < 1.05 * used
