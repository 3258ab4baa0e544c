"""Other people's trainers, unchanged, under `zerodrift run`: those that are installed, on two CPU ranks.

Results in fp32 must be DeepSpeed's own, which are recorded here: `tests/e2e/on_deepspeed.py` runs the same
script on DeepSpeed 0.19.6. `docs/doors.md` has a row for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def run_cases(script: str, folder: Path, *cases: str) -> dict[str, Any]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "zerodrift", "run", "--", *torchrun, str(TESTS / script)]
    command += [str(folder), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "told.json").read_text())


LIGHTNING = {
    "first": [9.325114250183105, 2.9768831729888916],
    "straight": [9.325114250183105, 2.9768831729888916, 3.0363497734069824, 6.473243713378906],
    "resumed": [2.0575525760650635, 24.441268920898438],
}
FABRIC = [1.9205031394958496, 8.751940727233887, 9.816081047058105, 18.259262084960938]
"""Losses of the first rank on DeepSpeed 0.19.6, at stages 2 and 3 alike."""


@pytest.mark.long
def test_lightnings_trainer_and_fabric(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    cases = ("2/32-true", "3/32-true", "2/bf16-mixed", "3/bf16-true", "2/16-mixed")
    found = run_cases("e2e/lightning_loops.py", tmp_path, *cases)
    tolerances = {"32-true": 1e-6, "bf16-mixed": 0.1, "bf16-true": 0.1, "16-mixed": 0.25}
    for case in cases:
        near = tolerances[case.partition("/")[2]]
        trainer, fabric = found[case]["trainer"], found[case]["fabric"]
        assert trainer["engine"] == "zerodrift.deepspeed.engine"
        for part, losses in LIGHTNING.items():
            assert trainer[part] == pytest.approx(losses, rel=near), (case, part)
        assert fabric["losses"] == pytest.approx(FABRIC, rel=near)
        # In fp16 the first steps are skipped: the loss scale begins at 65536.
        assert fabric["resumed"] == fabric["losses"][2:] and fabric["step"] == 2


SFT = ([4.146212577819824, 4.094812393188477, 4.051012992858887], [1.7323565483, 1.4834070206, 1.5811127424])
"""Losses and norms on DeepSpeed 0.19.6."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "lora", "dpo", "kto", "reward", "grpo", "rloo", "gkd"])
def test_trls_trainers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    found = run_cases("doors/trl_trainers.py", tmp_path, f"{kind}/2", f"{kind}/3")
    two, three = found[f"{kind}/2"], found[f"{kind}/3"]
    assert two["engine"] == three["engine"] == "zerodrift.deepspeed.engine"
    assert len(two["losses"]) == len(two["norms"]) == 3 and all(0 < norm < 100 for norm in two["norms"])
    assert two["losses"] == three["losses"] and two["norms"] == pytest.approx(three["norms"], rel=1e-6)
    assert {"adapter_model.safetensors" if kind == "lora" else "model.safetensors"} <= set(three["files"])
    if kind == "sft":
        assert two["losses"] == pytest.approx(SFT[0], abs=1e-6) and two["norms"] == pytest.approx(
            SFT[1], rel=1e-6
        )
