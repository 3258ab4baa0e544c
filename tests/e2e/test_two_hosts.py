"""A run on two hosts has the numbers of one host, also after one of them lost its rank."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.hosts import possible, two_hosts
from tests.e2e.jobs import QUICKLY, job, losses
from tests.e2e.test_jobs import SMALL
from tests.e2e.test_train_launch import children, on_two_ranks, rank_of, until

WHY_NOT = possible()
# Two launchers and two ranks each; `tests/ranks/test_shared.py` has ranks of several hosts in one process.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

STEPS = 10


def finish(processes: list[subprocess.Popen[str]]) -> list[str]:
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=150)[0])
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return said


def test_the_example_trains_on_two_hosts(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")
    changes = [*SMALL, f"run.folder={tmp_path}/run", f"data.cache={tmp_path}/cache"]
    with two_hosts() as (one, other):
        file = Path("examples/jobs/two-hosts.yaml")
        said = finish([host.start(one, file, "--max-restarts=3", changes=changes) for host in (one, other)])
    assert "ranks      replicate 2 (2 ranks)" in said[0], "a copy on each"
    assert "step 2/2" in said[0] and "step " not in said[1], "one rank of all speaks"
    assert list(losses(tmp_path)) == [1, 2]
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


def test_a_host_that_loses_its_rank_comes_back_and_two_are_as_one(tmp_path: Path) -> None:
    file = job(tmp_path, "slow", STEPS, run={"checkpoint_every": 2})
    with two_hosts() as (one, other):
        processes = [host.start(one, file, "--max-restarts=2", changes=QUICKLY[1:]) for host in (one, other)]
        until(tmp_path, 5, processes[0])
        (victim,) = (pid for pid in children(processes[1].pid) if rank_of(pid) is not None)
        os.kill(victim, signal.SIGKILL)
        said = finish(processes)
    assert "going on after step" in said[0] + said[1]
    assert losses(tmp_path) == on_two_ranks(tmp_path / "one", STEPS)
