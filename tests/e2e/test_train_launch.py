"""Runs of several processes: signals, a rank that is killed, torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.commands import Command
from tests.e2e.jobs import QUICKLY, job, losses, on_a_rank
from tests.ranks.harness import run_ranks
from zerodrift.train.loop.launcher import signal_name

STEPS = 12

Process = Command | subprocess.Popen[str]


def train(file: Path) -> Command:
    """Train on two ranks."""
    return Command("train", file, "--nproc", "2", *QUICKLY)


def until(folder: Path, step: int, process: Process) -> None:
    """Wait for a step of the run."""
    deadline = time.monotonic() + 150.0
    while time.monotonic() < deadline:
        if max(losses(folder), default=0) >= step:
            return
        if process.poll() is not None:
            raise AssertionError("".join(filter(None, process.communicate())))
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no step {step} in 150 s: {''.join(filter(None, process.communicate()))}")


def children(pid: int) -> list[int]:
    """Return every descendant of a process, in the order of their starts."""
    found = []
    for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(text), *children(int(text))]
    return found


def rank_of(pid: int) -> int | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    found = [int(each[5:]) for each in variables if each.startswith(b"RANK=")]
    return found[0] if found and b"zerodrift" in command else None


def finished(process: Process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def on_two_ranks(folder: Path, steps: int) -> dict[int, float]:
    """Return the losses of an undisturbed run."""
    run_ranks(on_a_rank, 2, str(job(folder, "not_slow", steps)), QUICKLY[1:])
    found = losses(folder)
    assert list(found) == list(range(1, steps + 1))
    return found


def test_a_run_that_is_stopped_and_then_loses_a_rank_goes_on(tmp_path: Path) -> None:
    file = job(tmp_path, "slow", STEPS, run={"checkpoint_every": 4})

    # A signal finishes the step and saves.
    process = train(file)
    until(tmp_path, 2, process)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.send_signal(signal.SIGTERM)
    code, out, err = finished(process)
    assert code == 128 + signal.SIGTERM, out + err
    done = max(losses(tmp_path))
    assert err == "" and out.count("zerodrift train ") == 1, "one rank speaks"
    assert "finishing this step, then saving" in out and out.count("again: stop at once") == 1
    assert 2 <= done < STEPS
    assert f"{signal_name('SIGTERM')}: step {done} is finished and saved" in out
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)

    # A rank that is killed is named.
    process = train(file)
    until(tmp_path, done + 1, process)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    code, out, err = finished(process)
    assert code == 2
    assert f"going on after step {done}" in out
    assert err.startswith(
        "zerodrift: error: `rank 1`: all 2 ranks must run to the end; got one that was ended by SIGKILL"
    )
    assert "Traceback" not in err
    assert max(losses(tmp_path)) < STEPS

    run_ranks(on_a_rank, 2, str(file), QUICKLY[1:])
    assert losses(tmp_path) == on_two_ranks(tmp_path / "undisturbed", STEPS)


def test_a_refusal_in_the_ranks_is_told_once(tmp_path: Path) -> None:
    code, out, err = finished(train(job(tmp_path, "no_such_model")))
    assert (code, out) == (2, "")
    assert err.count("`tests.e2e.small_models` must have `no_such_model`") == 1 and "Traceback" not in err


def test_a_defect_is_told_once_with_its_traceback(tmp_path: Path) -> None:
    code, _, err = finished(train(job(tmp_path, "broken", steps=3)))
    assert code == 1 and err.count("KeyError: 'broken on purpose'") == 1, err
    assert "rank 1 of 2" in err


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    process = train(job(tmp_path, "slow", 1000))
    until(tmp_path, 2, process)
    ranks = children(process.pid)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(map(_alive, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
