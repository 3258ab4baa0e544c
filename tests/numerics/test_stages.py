"""The promise: stages 0-3 are the same numbers, bit for bit, in every mode, with different memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numerics.networks import GPT
from tests.numerics.runs import config, make, same, train
from tests.ranks.harness import run_ranks

MODES = ("fp32", "bf16", "fp16", "autocast-bf16")
STEPS = 50


def run_stages(
    stages: tuple[int, ...], mode: str, moe: bool, micro: int, steps: int, rest: dict[str, Any]
) -> list[str]:
    """On one rank: the same training at several stages; what differs, and whether it learned."""
    runs = []
    for stage in stages:
        engine = make(config(stage, mode, micro, **rest), GPT(moe=moe))
        runs.append(train(engine, steps, micro))
        engine.destroy()
    first = runs[0]
    assert first.losses[-1] < first.losses[0] - 1.0, f"did not learn: {first.losses[0]} -> {first.losses[-1]}"
    return same(runs)


@pytest.mark.parametrize(
    ("world", "moe"),
    [
        pytest.param(world, moe, id=f"{world}-{name}", marks=[pytest.mark.slow] * (world == 4 and not moe))
        for world in (1, 2, 4)
        for moe, name in ((False, "dense"), (True, "moe"))
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_all_stages_are_the_same_bits_with_one_micro_batch(world: int, mode: str, moe: bool) -> None:
    for found in run_ranks(run_stages, world, (0, 1, 2, 3), mode, moe, 1, STEPS, {}, timeout=280):
        assert found == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["last", "every"])
def test_all_stages_are_the_same_bits_when_they_reduce_alike(mode: str, when: str) -> None:
    rest = {"precision": {"reduce": {"when": when}}}
    for found in run_ranks(run_stages, 2, (0, 1, 2, 3), mode, True, 4, 20, rest, timeout=200):
        assert found == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stages", [(0, 1), (2, 3)])
def test_stages_that_reduce_alike_by_default_are_the_same_bits(mode: str, stages: tuple[int, ...]) -> None:
    for found in run_ranks(run_stages, 2, stages, mode, False, 4, 20, {}, timeout=200):
        assert found == []
