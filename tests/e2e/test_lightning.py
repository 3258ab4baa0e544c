"""The strategy for Lightning's Trainer, beside its own DDP: losses, steps, weights, and resuming.

`make doors` runs its DeepSpeed strategies, unchanged under `zerodrift run`, beside DeepSpeed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed")

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("lightning_script.py")
pytestmark = pytest.mark.long


def run(folder: Path, *words: object) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=folder, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("found "))
    found: dict[str, Any] = json.loads(line.removeprefix("found "))
    return found


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("ddp"), "ddp", 0, "fp32", 3)


@pytest.mark.parametrize("stage", [0, 3])
def test_it_trains_as_ddp_does(stage: int, tmp_path: Path, ddp: dict[str, Any]) -> None:
    found = run(tmp_path, "zerodrift", stage, "fp32", 3)
    assert found["steps"] == ddp["steps"] == 9, "five batches are three steps of two"
    for name in ("losses", "weights", "val", "again"):
        assert found[name] == pytest.approx(ddp[name], abs=1e-6), name
    assert (tmp_path / "last.ckpt" / "lightning.ckpt").is_file()


def test_a_run_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "zerodrift", 3, "bf16", 3)
    run(tmp_path / "first", "zerodrift", 3, "bf16", 1)
    rest = run(tmp_path / "rest", "zerodrift", 2, "bf16", 3, tmp_path / "first" / "last.ckpt")
    assert rest["steps"] == whole["steps"]
    assert rest["losses"] == whole["losses"][-len(rest["losses"]) :]
    assert rest["weights"] == whole["weights"]


def test_what_both_sides_say_is_the_same() -> None:
    import lightning.pytorch as pl

    from tests.e2e.lightning_script import Net, data
    from zerodrift.errors import ConfigError
    from zerodrift.lightning import ZeroDriftStrategy

    plain: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "fast_dev_run": 2}
    for config, arguments, said in (
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 2}, "4 in the config and 2 there"),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, "1.0 in the config and 0.5 there"),
    ):
        trainer = pl.Trainer(strategy=ZeroDriftStrategy(config, quiet=True), **plain, **arguments)
        try:
            with pytest.raises(ConfigError, match=said):
                trainer.fit(Net(), data(8))
            trainer.validate(Net(), data(8), verbose=False)  # which takes no steps
        finally:
            torch.distributed.destroy_process_group()
