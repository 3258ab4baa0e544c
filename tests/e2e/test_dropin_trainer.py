"""The real transformers.Trainer and a loop over `accelerate`, by the name of DeepSpeed, on zerodrift."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launching import by_hand

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TRAINER, LOOP = (str(Path(__file__).with_name(name)) for name in ("hf_trainer.py", "accelerate_loop.py"))

NEAR = 1e-6
"""Tolerance of losses around 10 in fp32, because DeepSpeed's norm is a float and ours is exact."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the trainer at both stages and the loop, with one start for all."""
    made = tmp_path_factory.mktemp("trainer")
    by_hand([TRAINER, str(made), "2", "3"], [LOOP, str(made), "3", "zerodrift"], folder=made)
    return made


@pytest.mark.parametrize("stage", ["2", "3"])
def test_trainer_trains_checkpoints_evaluates_and_resumes(stage: str, folder: Path) -> None:
    told = json.loads((folder / stage / "told.json").read_text())
    assert told["engine"] == "zerodrift.deepspeed.engine"
    assert len(told["losses"]) == 4 and all(0 < norm < 100 for norm in told["norms"])
    assert told["resumed"] == told["losses"] and told["again"] == told["evaluated"]
    assert told["evaluated"] < told["losses"][0]
    assert told["checkpoints"] == ["-2", "-4"] and told["missing"] == []


def of_loop(folder: Path) -> dict[str, Any]:
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


def test_a_loop_over_accelerate_trains_clips_saves_and_loads(folder: Path) -> None:
    check(of_loop(folder))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, which is not installed"
)
def test_it_has_the_losses_that_deepspeed_has(tmp_path: Path) -> None:
    found = {}
    for engine in ("zerodrift", "deepspeed"):
        (tmp_path / engine).mkdir()
        by_hand([LOOP, str(tmp_path / engine), "2", engine], folder=tmp_path / engine)
        found[engine] = of_loop(tmp_path / engine)
    ours, theirs = found.values()
    check(ours)
    assert theirs["engine"] == "deepspeed.runtime.engine"
    for part in ("first", "second", "again"):
        for what in ("losses", "norms", "rates"):
            assert ours[part][what] == pytest.approx(theirs[part][what], rel=NEAR), (part, what)
