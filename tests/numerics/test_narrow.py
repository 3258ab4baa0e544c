"""Narrow formats in the columns of a run: the values that are computed with, and the parts that are summed."""

from __future__ import annotations

import pytest

from tests.numerics.test_stages import train_alike
from tests.ranks.harness import on_ranks

GATHERS = ("fp8", "mxfp8", "int8")
WIRES = (*GATHERS, "int4", "e5m2-128")


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("mode", ["bf16", "autocast-bf16", "fp32", "fp16"])
@pytest.mark.parametrize("world", [1, 2])
@on_ranks("world", timeout=200)
def test_a_narrow_gather_is_the_same_bits_at_every_stage(world: int, mode: str, gather: str) -> None:
    losses = train_alike(mode, True, gather=gather)
    assert losses != train_alike(mode, True, stages=(0,))


@pytest.mark.parametrize("wire", WIRES)
@on_ranks(2, timeout=200)
def test_a_narrow_wire_is_the_same_bits_at_every_stage(wire: str) -> None:
    for when in ("last", "every"):
        reduce = {"wire": wire, "when": when}
        train_alike("bf16", True, micro=2, reduce=reduce)
