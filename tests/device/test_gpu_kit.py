"""`make gpu` runs as a whole on the stand-in device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.build import needs_device
from tests.device.plugin import ROOT


@needs_device
@pytest.mark.slow
@pytest.mark.timeout(6700)
def test_all_of_the_kit(tmp_path: Path) -> None:
    """Every part runs, from the tests to the last benchmark, on the device that the kit itself finds."""
    command = [sys.executable, "bench/gpu.py", "--stub", "--minutes", "100", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=6600)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "failed" not in said and "left out:" not in said, said
    steps = [json.loads(path.read_text()) for path in tmp_path.glob("step-tiny-*.json")]
    assert len(steps) == 5 and all(found["allocated"] > 0 for found in steps)
    assert {found["device"] for found in steps} == {"the stand-in device"}
    # The same model, batches and rate: the engines differ by what they round.
    first = [found["losses"][0] for found in steps if found["micro_batches"] == 1]
    assert max(first) - min(first) < 0.05
