"""671 billion parameters for 2,048 ranks are planned on a laptop: `bench/plan_scale.py` and its limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_deepseek_v3_plans_within_its_limits() -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, "bench/plan_scale.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoint, config = (
        line.split() for line in done.stdout.splitlines() if line.startswith(("safetensors", "HF config"))
    )
    # 45,395 tensors; transformers merges the experts of a layer and keeps the correction bias as a buffer.
    assert checkpoint[4:7] == ["671,026,419,200", "45,395", "58"]
    assert config[5:8] == ["671,026,404,352", "909", "58"]
