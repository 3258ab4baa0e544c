"""The real transformers.Trainer and a loop over `accelerate`, by the name of DeepSpeed, on zerodrift."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launching import by_hand

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TRAINER, LOOP = (str(Path(__file__).with_name(name)) for name in ("hf_trainer.py", "accelerate_loop.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the trainer at both stages and the loop, with one start for all."""
    made = tmp_path_factory.mktemp("trainer")
    by_hand([TRAINER, str(made), "2", "3"], [LOOP, str(made)], folder=made)
    return made


@pytest.mark.parametrize("stage", ["2", "3"])
def test_trainer_trains_checkpoints_evaluates_and_resumes(stage: str, folder: Path) -> None:
    told = json.loads((folder / stage / "told.json").read_text())
    assert told["engine"] == "zerodrift.deepspeed.engine"
    assert len(told["losses"]) == 4 and all(0 < norm < 100 for norm in told["norms"])
    assert told["resumed"] == told["losses"] and told["again"] == told["evaluated"]
    assert told["evaluated"] < told["losses"][0]
    assert told["checkpoints"] == ["-2", "-4"] and told["missing"] == []


def test_a_loop_over_accelerate_trains_clips_saves_and_loads(folder: Path) -> None:
    """The table of docs/doors.md has such loops beside DeepSpeed."""
    run, other = (json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2))
    assert run["first"] == other["first"]
    assert run["engine"] == "zerodrift.deepspeed.engine" and run["unwrapped"] == "Sequential"
    # Six micro-batches, three steps; the clip's norm is the step's.
    assert len(run["first"]["losses"]) == 6 and len(run["first"]["norms"]) == 3
    assert run["first"]["rates"] == pytest.approx([1e-2, *[1e-2 / 3] * 2, *[1e-2 / 5] * 2, 1e-2 / 7])
    assert run["again"] == run["second"] != run["first"], "loading the state is going back"
    assert run["shapes"] == {"0.weight": [32, 8], "0.bias": [32], "2.weight": [1, 32], "2.bias": [1]}
    assert run["gathered"] == [8, 1]
