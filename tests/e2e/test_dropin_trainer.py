"""The real transformers.Trainer and a loop over `accelerate`, by the name of DeepSpeed, on zerodrift."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.launching import by_itself

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the trainer at both stages and the loop, with one start for all."""
    made = tmp_path_factory.mktemp("trainer")
    by_itself(Path(__file__).with_name("hf_trainer.py"), str(made), "2", "3", folder=made)
    return made


@pytest.mark.parametrize("stage", ["2", "3"])
def test_trainer_trains_checkpoints_evaluates_and_resumes(stage: str, folder: Path) -> None:
    told = json.loads((folder / stage / "told.json").read_text())
    assert told["engine"] == "zerodrift.deepspeed.engine"
    assert len(told["losses"]) == 4 and all(0 < norm < 100 for norm in told["norms"])
    assert told["resumed"] == told["losses"] and told["again"] == told["evaluated"]
    assert told["evaluated"] < told["losses"][0]
    assert told["checkpoints"] == ["checkpoint-2", "checkpoint-4"]
    assert {"config.json", "model.safetensors"} <= {*told["saved"]}


def test_a_loop_over_accelerate_trains_clips_saves_and_loads(folder: Path) -> None:
    """The table of docs/doors.md has such loops beside DeepSpeed."""
    run, other = (json.loads((folder / f"loop-{rank}.json").read_text()) for rank in range(2))
    assert run["first"] == other["first"] and run["engine"] == "zerodrift.deepspeed.engine"
    losses, rates, norms = run["first"]
    assert len(losses) == 6 and len(norms) == 3, "six micro-batches, three steps"
    assert rates == pytest.approx([1e-2, *[1e-2 / 3] * 2, *[1e-2 / 5] * 2, 1e-2 / 7])
    assert run["again"] == run["second"] != run["first"], "loading the state is going back"
    assert run["shapes"] == {"0.weight": [32, 8], "0.bias": [32], "2.weight": [1, 32], "2.bias": [1]}
