"""Lightning's trainers by DeepSpeed's name, unchanged, under `zerodrift run` on two CPU ranks.

Results in fp32 must be DeepSpeed's own, which are recorded here: `tests/e2e/on_deepspeed.py` runs the same
script on DeepSpeed 0.19.6. Trainers of others are run by `make doors`: `docs/doors.md` has a row for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(Path(__file__).with_name("lightning_loops.py"))
    command = [sys.executable, "-m", "zerodrift", "run", "--", *torchrun, script, str(tmp_path), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads((tmp_path / "told.json").read_text())
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
