"""A user's loop over `accelerate` with a DeepSpeed plugin gives the same on zerodrift and DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launching import by_hand

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

LOOP = Path(__file__).parent / "accelerate_loop.py"

NEAR = 1e-6
"""Tolerance of losses around 10 in fp32, because DeepSpeed's norm is a float and ours is exact."""


def run_loop(folder: Path, stage: int, engine: str) -> dict[str, Any]:
    folder.mkdir()
    by_hand(LOOP, [str(folder), str(stage), engine], folder)
    ranks = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["first"] == ranks[1]["first"]
    return ranks[0]


def check(run: dict[str, Any]) -> None:
    assert run["engine"] == "zerodrift.deepspeed.engine" and run["unwrapped"] == "Sequential"
    # Six micro-batches, three steps; the clip's norm is the step's.
    assert len(run["first"]["losses"]) == 6 and len(run["first"]["norms"]) == 3
    assert run["first"]["rates"] == pytest.approx([1e-2, *[1e-2 / 3] * 2, *[1e-2 / 5] * 2, 1e-2 / 7])
    assert run["again"] == run["second"] != run["first"], "loading the state is going back"
    assert run["shapes"] == {"0.weight": [32, 8], "0.bias": [32], "2.weight": [1, 32], "2.bias": [1]}
    assert run["gathered"] == [8, 1]


def test_a_loop_over_accelerate_trains_clips_saves_and_loads(tmp_path: Path) -> None:
    check(run_loop(tmp_path / "run", 3, "zerodrift"))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, which is not installed"
)
def test_it_has_the_losses_that_deepspeed_has(tmp_path: Path) -> None:
    ours, theirs = run_loop(tmp_path / "ours", 2, "zerodrift"), run_loop(tmp_path / "theirs", 2, "deepspeed")
    check(ours)
    assert theirs["engine"] == "deepspeed.runtime.engine"
    for part in ("first", "second", "again"):
        for what in ("losses", "norms", "rates"):
            assert ours[part][what] == pytest.approx(theirs[part][what], rel=NEAR), (part, what)
