"""A run that is killed at any moment and resumed has the bits of an undisturbed one.

Ranks are killed with SIGKILL, at a random moment of training or when Python is about to touch a random file
of a save: one of them, so that the others must notice, or all of them at once. At chosen files they are
killed in `tests/ranks/test_checkpoint_failures.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import Run, config, finish, make
from tests.ranks.harness import run_ranks
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.checkpoint.folder import CheckpointFolder
from zerodrift.errors import RankError

STEPS = 7
WORLD = 2
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.link", "shutil.rmtree")
"""Audit events of Python for the file operations of a save."""


def arm(folder: str, kill: tuple[str, float]) -> None:
    """Arm this process to kill itself: after some seconds, or before its n-th operation in the folder."""
    how, when = kill
    if how == "time":
        threading.Timer(when, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return
    left = [int(when)]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and folder in str(arguments[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def life(folder: str, stage: int, asynchronous: bool, kills: dict[int, tuple[str, float]]) -> Any:
    """Train from the newest checkpoint to the last step, unless the rank is killed."""
    engine = make(config(stage, "bf16", scheduler=SCHEDULE), GPT())
    rank = engine.mesh.rank()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank + 1)
    checkpoints = Checkpoints(engine, folder, keep=2, asynchronous=asynchronous, quiet=True)
    if rank in kills:
        arm(folder, kills[rank])
    try:
        found = checkpoints.resume()
        first = 0 if found is None else found.client["step"]
        assert found is None or found.differences == ()
        for step in range(first, STEPS):
            shift = int(1e6 * (random.random() + np.random.rand() + float(torch.rand(()))))
            engine.backward(engine(batch(shift, rank)))
            engine.step()
            checkpoints.save(client={"step": step + 1})
        checkpoints.wait()
        run = finish(engine, Run(scales=[random.random(), float(torch.rand(()))]))
    except RankError:
        with contextlib.suppress(RankError):  # a save in the background misses the same rank
            engine.destroy()
        return "missed a rank"
    left = [path.name for path in Path(folder).iterdir() if path.name[0] == "."]
    tags = CheckpointFolder(folder).tags()
    engine.destroy()
    return run, first, left, tags


SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 20}}


def kill_and_resume(folder: Path, number: int, expected: list[Run]) -> int:
    """Run once with a kill and once without; return the step at which the second began."""
    draw = random.Random(number)
    asynchronous = bool(number % 2)
    # About what the loop below takes and touches here; a kill that comes too late is a run left alone.
    kill = ("time", draw.uniform(0.05, 1.5)) if draw.random() < 0.4 else ("touch", draw.randint(1, 140))
    who = draw.choice([(0,), (1,), (0, 1)])
    kills = dict.fromkeys(who, kill)
    stage = draw.randrange(4)
    run_ranks(life, WORLD, str(folder), stage, asynchronous, kills, dying=set(who))
    results = run_ranks(life, WORLD, str(folder), stage, asynchronous, {})
    for alone, (run, first, left, tags) in zip(expected, results, strict=True):
        assert alone.differs(run) == [], f"kill {kill} of {who} at stage {stage}"
        assert left == [], "what a dead save left is gone"
        assert len(tags) == 2 or first == STEPS
    return int(results[0][1])


@pytest.mark.timeout(1200)
@pytest.mark.slow
def test_kills_change_nothing(tmp_path: Path) -> None:
    expected = [run for run, *_ in run_ranks(life, WORLD, str(tmp_path / "alone"), 3, False, {})]
    began = [kill_and_resume(tmp_path / str(number), number, expected) for number in range(20)]
    assert len(set(began)) > 3, f"kills were not spread over the run: {began}"
