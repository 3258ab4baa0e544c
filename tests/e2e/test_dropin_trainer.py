"""The real transformers.Trainer on zerodrift: trains, checkpoints, evaluates, resumes."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

import zerodrift.deepspeed
from tests.e2e.launching import by_hand
from tests.ranks.harness import run_ranks
from zerodrift.errors import ZerodriftError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RUNNER = Path(__file__).parent / "hf_trainer.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trainer")
    by_hand(RUNNER, [str(made), "2", "3"], made)
    return made


@pytest.mark.parametrize("stage", ["2", "3"])
def test_trainer_trains_checkpoints_evaluates_and_resumes(stage: str, folder: Path) -> None:
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

    told = json.loads((folder / stage / "told.json").read_text())
    assert told["engine"] == "zerodrift.deepspeed.engine"
    assert len(told["losses"]) == 4 and all(0 < norm < 100 for norm in told["norms"])
    assert told["resumed"] == told["losses"] and told["again"] == told["evaluated"]
    assert told["evaluated"] < told["losses"][0]
    assert told["checkpoints"] == [f"{PREFIX_CHECKPOINT_DIR}-{step}" for step in (2, 4)]
    assert {CONFIG_NAME, SAFE_WEIGHTS_NAME} <= set(told["files"])


def as_deepspeed() -> None:
    import importlib.metadata
    import importlib.util

    import zerodrift.deepspeed as mine

    mine.activate()
    mine.activate()
    import deepspeed
    import deepspeed.utils.zero_to_fp32
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    assert deepspeed is mine and GatheredParameters is mine.zero.GatheredParameters
    assert deepspeed.utils.zero_to_fp32.__spec__.name == "zerodrift.deepspeed.utils.zero_to_fp32"
    assert importlib.metadata.version("deepspeed") == mine.__version__ == "0.19.6"
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.util.find_spec("deepspeed.nothing_of_the_kind") is None


def test_import_deepspeed_is_the_drop_in_after_activate() -> None:
    run_ranks(as_deepspeed, 1)


def test_activate_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("deepspeed")
    real.__file__ = "real.py"
    monkeypatch.setitem(sys.modules, "deepspeed", real)
    with pytest.raises(ZerodriftError, match=r"real\.py"):
        zerodrift.deepspeed.activate()
    assert sys.modules["deepspeed"] is real
