"""Launching: SLURM's variables, the environment of a rank, and messages about failures."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zerodrift.errors import ConfigError, RankError, ZerodriftError
from zerodrift.model import attempt
from zerodrift.train.loop import launcher as launch
from zerodrift.train.loop.launcher import IN_ORDER, RankFailedError, exit_code, listen, slurm

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "41234",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login",
}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[03-05,9],login", "gpu03"), ("a1,b2", "a1"), ("n[12,14]-ib", "n12-ib"), ("", "")],
)
def test_slurm_becomes_torchruns_variables_where_it_started_ranks(nodes: str, host: str) -> None:
    place = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    found = slurm({**STEP, "SLURM_STEP_NODELIST": nodes})
    assert found == {**place, "MASTER_ADDR": host, "MASTER_PORT": "21234"}
    assert slurm({**STEP, "MASTER_ADDR": "head"})["MASTER_ADDR"] == "head"  # type: ignore[index]
    assert slurm({**STEP, "RANK": "0"}) is slurm({**STEP, "SLURM_NTASKS": "1"}) is None
    assert slurm({key: value for key, value in STEP.items() if key != "SLURM_PROCID"}) is None


Failure = tuple[str, ZerodriftError | None, float]


def ended(folder: Path, number: int, code: int, failure: Failure | None) -> launch._Rank:
    """Return a rank that has ended with a code, and perhaps (reason, the error it was refused with, time)."""
    end = f"import os, signal; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    process = subprocess.Popen([sys.executable, "-c", end])
    process.wait()
    place = folder / f"{number}.failure"
    if failure is not None:
        launch.write_failure(str(place), *failure)
    return launch._Rank(number, process, place, folder / f"{number}.txt")


REFUSAL = ConfigError("data", "must be there")
MISSED = (2, ("rank 1 is missing", RankError.relayed("rank 1 is missing"), 20.0))


@pytest.mark.parametrize(
    ("ends", "kind", "words"),
    [
        (
            [MISSED, (2, (str(REFUSAL), REFUSAL, 10.0))],
            *(ConfigError, ["rank 1: `data`: must be there"]),
        ),
        ([MISSED, (-signal.SIGKILL, None)], ZerodriftError, ["`rank 1`", "SIGKILL", "last checkpoint"]),
        ([(1, ("Traceback ...\nKeyError: 3", None, 1.0))], RankFailedError, ["KeyError: 3"]),
    ],
    ids=["the first of them", "a killed one before those that missed it", "a defect with its traceback"],
)
def test_the_rank_that_failed_first_is_told(
    tmp_path: Path, ends: list[tuple[int, Failure | None]], kind: type, words: list[str]
) -> None:
    ranks = [ended(tmp_path, number, *end) for number, end in enumerate(ends)]
    told = launch._first_failure(ranks, len(ranks))
    assert type(told) is kind and all(word in str(told) for word in words)
    if isinstance(told, ConfigError):
        assert told.problems == REFUSAL.problems and told.see() == REFUSAL.see()


def test_the_first_signal_asks_and_handlers_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listen() as stop:
        stop.doing = "finishing"
        assert not stop.asked
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked and stop.by == "SIGTERM" and exit_code(stop.by) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    said = capfd.readouterr().out
    assert said == "SIGTERM: finishing\nSIGTERM again: stop at once, without saving\n"


def test_before_the_first_step_a_signal_ends_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, listen():
        attempt(lambda: signal.raise_signal(signal.SIGTERM), "model", "must be built")
    assert ended.value.code == 143
    assert "stopped before the first step, with nothing to save" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("code", "asked", "ends"),
    [
        (0, [signal.SIGINT], 0),
        (IN_ORDER + 2, [signal.SIGINT], 130),
        (IN_ORDER + 15, [], 143),
        (-9, [signal.SIGINT, signal.SIGINT], 130),
    ],
)
def test_how_ranks_end_is_how_the_run_ends(tmp_path: Path, code: int, asked: list[int], ends: int) -> None:
    launcher = launch.Launcher.__new__(launch.Launcher)
    launcher._ranks = [ended(tmp_path, number, code, None) for number in range(2)]
    launcher._asked, launcher._failed, launcher._count = list(asked), [], 2
    assert launcher._watch() == ends


def test_a_rank_that_the_launcher_had_to_kill_is_not_the_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.2)
    launcher = launch.Launcher.__new__(launch.Launcher)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", f"{deaf}; time.sleep(60)"], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()  # it hears no SIGTERM any more
    deaf_rank = launch._Rank(0, process, tmp_path / "0.failure", tmp_path / "0.txt")
    launcher._ranks = [deaf_rank, ended(tmp_path, 1, -signal.SIGKILL, None)]
    launcher._asked, launcher._failed, launcher._count = [], [], 2
    with pytest.raises(ZerodriftError, match=r"`rank 1`: all 2 ranks must run to the end; .* SIGKILL"):
        launcher._watch()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
