"""A script that imports the drop-in, started by the `deepspeed` command: its ranks find each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.launching import deepspeed

SCRIPT = Path(__file__).parent / "launched.py"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


@pytest.mark.skipif(
    not Path(sys.executable).with_name("deepspeed").exists(),
    reason="needs the command `deepspeed`, which is not installed",
)
def test_the_deepspeed_command_starts_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = str(tmp_path / "config.json")
    deepspeed(SCRIPT, ["--folder", str(tmp_path), "--deepspeed", "--deepspeed_config", config], tmp_path)
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)]
    for rank, found in enumerate(told):
        assert found["rank"] == rank and found["world"] == 2 and found["local"] == [rank] * 3
        assert found["losses"][0] > found["losses"][-1]
    assert told[0]["norm"] == told[1]["norm"] and told[0]["losses"] != told[1]["losses"]
