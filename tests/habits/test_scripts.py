"""Every script has the results of plain torch under the drop-in, and those of an installed DeepSpeed."""

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
from tests.habits.cells import SCRIPTS, Cell, Setting, cells_of, run
from tests.habits.driven import OnDeepSpeed
from tests.habits.loop import Habit, Seen, differences
from tests.ranks.harness import run_ranks

RUNNER = Path(__file__).parent / "deepspeed_runner.py"
SETTINGS = [Setting(stage, "fp32", ranks, scripts=True) for ranks in (2, 1) for stage in (3, 2, 1, 0)]


def at(setting: Setting, habit: Habit) -> Any:
    """Return a test of a script in a setting: `make test` runs its highest stage, on two ranks."""
    marks = [] if (setting.ranks, setting.stage) == (2, max(habit.stages)) else [pytest.mark.slow]
    return pytest.param(setting, habit.name, id=f"{setting}-{habit.name}", marks=marks)


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest) -> dict[Setting, Cell]:
    return cells_of(request)


@pytest.mark.parametrize(
    ("setting", "name"),
    [at(each, script) for each in SETTINGS for script in SCRIPTS.values() if each.stage in script.stages],
)
def test_a_script_does_as_plain_torch_does(cells: dict[Setting, Cell], setting: Setting, name: str) -> None:
    problem = cells[setting].problem(name)
    assert not problem, problem


def test_the_comparison_can_fail() -> None:
    pairs: list[tuple[Any, Any, float]] = [
        ([1.0, 2.0], [1.0, 2.001], 1e-6),
        (torch.ones(2), torch.ones(2) + 1e-6, 1e-7),
        (torch.ones(2), torch.ones(2).double(), 1.0),
        (torch.ones(2), torch.tensor([1.0, float("nan")]), 1.0),
        (True, False, 1.0),
        ({"a": 1}, {"b": 1}, 1.0),
    ]
    for one, other, close in pairs:
        assert differences([("a", one)], [("a", other)], close) and not differences(
            [("a", one)], [("a", one)], 0
        )
    assert differences([("a", 1)], [("b", 1)], 1.0)
    assert not differences([("a", [1.0, "s", 3])], [("a", [1.0 + 1e-9, "s", 3])], 1e-6)


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


def under_the_drop_in(name: str, stage: int) -> Seen:
    loop, _, trouble = run(SCRIPTS[name], OnDeepSpeed, Setting(stage, "fp32"), zerodrift.deepspeed)
    assert not trouble, trouble
    return loop.seen


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.timeout(800)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_as_deepspeed_does(name: str) -> None:
    script, wrong = SCRIPTS[name], []
    for stage in {*script.stages} & {*script.alike}:
        theirs = of_deepspeed()[name, stage]
        assert isinstance(theirs, list), f"DeepSpeed raised at stage {stage}\n{theirs}"
        found = run_ranks(under_the_drop_in, 2, name, stage)[0]
        wrong += [f"stage {stage}: {each}" for each in differences(theirs, found, script.close)]
    assert not wrong, "\n".join(wrong)
