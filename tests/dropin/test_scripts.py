"""Every script has the results of plain torch at every stage, and those of an installed DeepSpeed."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import zerodrift.deepspeed
from tests.dropin import plain
from tests.dropin.run_scripts import SCRIPTS, told
from tests.dropin.script import STAGES, apart
from tests.ranks.harness import run_ranks

RUNNER = Path(__file__).parent / "run_scripts.py"


def against_plain(name: str, stages: tuple[int, ...]) -> list[str]:
    """List the drop-in's differences from plain torch, at these stages or else at the script's last."""
    script = SCRIPTS[name]
    chosen = sorted({*script.stages} & {*stages}) or [script.stages[-1]]
    expected = None if script.own else told(script, plain, 0)
    found = {stage: told(script, zerodrift.deepspeed, stage) for stage in chosen}
    if expected is None:
        return []
    return [wrong for stage in chosen for wrong in apart(found[stage], expected, f"stage {stage}:")]


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [(2, (3,)), *(pytest.param(ranks, STAGES, marks=pytest.mark.slow) for ranks in (1, 2))],
)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_as_plain_torch_does(name: str, ranks: int, stages: tuple[int, ...]) -> None:
    for wrong in run_ranks(against_plain, ranks, name, stages):
        assert not wrong, "\n".join(wrong)


def test_the_comparison_can_fail() -> None:
    assert apart({"a": [1.0, 2.0]}, {"a": [1.0, 2.001]}, "x") == ["x a[1]: 2.0 for 2.001"]
    assert apart({"a": True}, {"a": False}, "x", 1.0)
    assert not apart({"a": [1.0, "s", 3]}, {"a": [1.0 + 1e-9, "s", 3]}, "x")


@functools.cache
def of_deepspeed() -> dict[tuple[str, int], Any]:
    """Run all scripts under DeepSpeed on two ranks, in one start."""
    with tempfile.TemporaryDirectory(prefix="scripts-") as folder:
        file = Path(folder) / "told"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [*launch, str(RUNNER), str(file)], env=environment, capture_output=True, text=True, timeout=500
        )
        assert file.exists(), done.stdout[-2000:] + done.stderr[-4000:]
        found: dict[tuple[str, int], Any] = torch.load(file, weights_only=False)
        return found


def at_a_stage(name: str, stage: int) -> dict[str, Any]:
    return told(SCRIPTS[name], zerodrift.deepspeed, stage)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.timeout(800)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_as_deepspeed_does(name: str) -> None:
    script = SCRIPTS[name]
    wrong = []
    for stage in script.stages:
        if stage in script.alike:
            theirs = of_deepspeed()[name, stage]
            assert isinstance(theirs, dict), f"DeepSpeed raised at stage {stage}\n{theirs}"
            mine = run_ranks(at_a_stage, 2, name, stage)[0]
            wrong += apart(mine, theirs, f"stage {stage}:", script.close)
    assert not wrong, "\n".join(wrong)
