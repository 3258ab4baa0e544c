"""The promise: stages 0-3 are the same numbers, bit for bit, in every mode, with different memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numerics.networks import GPT
from tests.numerics.runs import config, make, same, train
from tests.ranks.harness import run_ranks

MODES = ("fp32", "bf16", "fp16", "autocast-bf16")
STAGES = (0, 1, 2, 3)
FOUR = ((False, "fp16", STAGES), (True, "bf16", (0, 3)))
"""What `make test` runs on four ranks: (whether with experts, mode, stages)."""
TWO, FEW, ENOUGH, MANY = 2, 3, 8, 50
"""Steps. In the first few all that stages do differently is done; the others are enough to learn."""


def run_stages(
    stages: tuple[int, ...], mode: str, moe: bool, micro: int, steps: int, rest: dict[str, Any]
) -> tuple[list[str], list[float]]:
    """On one rank: the same training at several stages; what differs, and the losses of the first."""
    runs = []
    for stage in stages:
        engine = make(config(stage, mode, micro, **rest), GPT(moe=moe))
        runs.append(train(engine, steps, micro))
        engine.destroy()
    return same(runs), runs[0].losses


@pytest.mark.cells(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("world", [1, 2])
def test_all_stages_are_the_same_bits_with_one_micro_batch(world: int, moe: bool, mode: str) -> None:
    assert_same(world, mode, moe)


@pytest.mark.parametrize(
    ("moe", "mode", "stages"),
    [
        *FOUR,
        *(pytest.param(moe, mode, STAGES, marks=pytest.mark.slow) for moe in (False, True) for mode in MODES),
    ],
)
def test_all_stages_are_the_same_bits_on_four_ranks(moe: bool, mode: str, stages: tuple[int, ...]) -> None:
    assert_same(4, mode, moe, stages)


def assert_same(world: int, mode: str, moe: bool, stages: tuple[int, ...] = STAGES) -> None:
    for differs, _ in run_ranks(run_stages, world, stages, mode, moe, 1, FEW, {}, timeout=200):
        assert differs == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "moe", "stages", "steps"),
    [
        pytest.param(2, False, (0, 3), ENOUGH, id="2-dense"),
        *(
            pytest.param(world, moe, STAGES, MANY, id=f"{world}-{name}-all", marks=pytest.mark.slow)
            for world in (1, 2, 4)
            for moe, name in ((False, "dense"), (True, "moe"))
        ),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_learns_is_the_same_bits(
    world: int, moe: bool, stages: tuple[int, ...], steps: int, mode: str
) -> None:
    for differs, losses in run_ranks(run_stages, world, stages, mode, moe, 1, steps, {}, timeout=280):
        assert differs == []
        assert losses[-1] < losses[0] - 1.0, f"did not learn: {losses[0]} -> {losses[-1]}"


@pytest.mark.cells(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["last", "every"])
def test_all_stages_are_the_same_bits_when_they_reduce_alike(mode: str, when: str) -> None:
    rest = {"precision": {"reduce": {"when": when}}}
    for differs, _ in run_ranks(run_stages, 2, STAGES, mode, True, 4, TWO, rest, timeout=200):
        assert differs == []


@pytest.mark.cells(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stages", [(0, 1), (2, 3)])
def test_stages_that_reduce_alike_by_default_are_the_same_bits(mode: str, stages: tuple[int, ...]) -> None:
    for differs, _ in run_ranks(run_stages, 2, stages, mode, False, 4, TWO, {}, timeout=200):
        assert differs == []
