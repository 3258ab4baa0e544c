"""Who is started where: SLURM's variables, what a rank is told, what is said when one fails."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zerodrift.errors import ZerodriftError
from zerodrift.train.loop import launcher as launch
from zerodrift.train.loop.launcher import (
    Failure,
    LaunchRequest,
    RankArguments,
    RankFailedError,
    first_host,
    slurm,
)
from zerodrift.train.loop.signals import IN_ORDER, exit_code, listen

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "41234",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu7", "gpu7"),
        ("a1,b2", "a1"),
        ("n[12,14]-ib", "n12-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_slurm_becomes_torchruns_variables() -> None:
    assert slurm(STEP) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "21234",
    }
    assert slurm({**STEP, "MASTER_ADDR": "head"})["MASTER_ADDR"] == "head"  # type: ignore[index]


@pytest.mark.parametrize("change", [{"RANK": "0"}, {"SLURM_NTASKS": "1"}, {"SLURM_PROCID": None}])
def test_slurm_is_not_joined_where_it_did_not_start_ranks(change: dict[str, str | None]) -> None:
    environment = {key: value for key, value in {**STEP, **change}.items() if value is not None}
    assert slurm(environment) is None


def test_what_a_rank_is_told_survives_its_command_line() -> None:
    work = RankArguments(
        "job é.yaml", ("a=b c", "d={}"), "/tmp/x", 7, True, LaunchRequest("zerodrift train", True)
    )
    assert RankArguments.from_json(work.to_json()) == work


def ended(tmp_path: Path, number: int, code: int, failure: Failure | None) -> launch._Rank:
    """A rank that has ended with a code, and perhaps said why."""
    end = f"import os, signal; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    process = subprocess.Popen([sys.executable, "-c", end])
    process.wait()
    place = tmp_path / f"{number}.failure"
    if failure is not None:
        failure.write(str(place))
    return launch._Rank(number, process, place, tmp_path / f"{number}.txt")


def test_the_first_failure_is_the_one_that_is_told(tmp_path: Path) -> None:
    ranks = [
        ended(tmp_path, 0, 2, Failure(20.0, "rank 1 is missing", refused=True)),
        ended(tmp_path, 1, 2, Failure(10.0, "`data`: must be there", refused=True)),
    ]
    told = launch._first_failure(ranks, 2)
    assert isinstance(told, ZerodriftError) and str(told) == "rank 1: `data`: must be there"


def test_a_killed_rank_comes_before_those_that_missed_it(tmp_path: Path) -> None:
    ranks = [
        ended(tmp_path, 0, 2, Failure(20.0, "rank 1 is missing", refused=True)),
        ended(tmp_path, 1, -signal.SIGKILL, None),
    ]
    told = launch._first_failure(ranks, 2)
    assert isinstance(told, ZerodriftError)
    assert "`rank 1`" in str(told) and "SIGKILL" in str(told) and "last checkpoint" in str(told)


def test_a_defect_is_told_with_its_traceback(tmp_path: Path) -> None:
    ranks = [ended(tmp_path, 0, 1, Failure(1.0, "Traceback ...\nKeyError: 3", refused=False))]
    told = launch._first_failure(ranks, 1)
    assert isinstance(told, RankFailedError) and "KeyError: 3" in str(told)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_step_a_signal_ends_it(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, listen():
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    assert "stopped before the first step, with nothing to save" in capfd.readouterr().out


def test_the_second_signal_does_not_ask() -> None:
    code = (
        "import signal\n"
        "from zerodrift.train.loop.signals import listen\n"
        "with listen() as stop:\n"
        "    stop.doing = 'finishing'\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print(stop.by, flush=True)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('still here')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    first, second = done.stdout.split("SIGINT\n")
    assert done.returncode == 130 and first.startswith("Ctrl-C: finishing\n")
    assert second.startswith("Ctrl-C: stopped at once, without saving\n")


@pytest.mark.parametrize(
    ("codes", "asked", "ends"),
    [
        ((0, 0), [], 0),
        ((0, 0), [signal.SIGINT], 0),
        ((IN_ORDER + 2, IN_ORDER + 2), [signal.SIGINT], 130),
        ((IN_ORDER, IN_ORDER + 15), [], 143),
        ((130, 130), [signal.SIGINT], 130),
        ((-9, -9), [signal.SIGINT, signal.SIGINT], 130),
    ],
)
def test_how_ranks_end_is_how_the_run_ends(
    tmp_path: Path, codes: tuple[int, int], asked: list[int], ends: int
) -> None:
    launcher = launch.Launcher.__new__(launch.Launcher)
    launcher._ranks = [ended(tmp_path, number, code, None) for number, code in enumerate(codes)]
    launcher._asked, launcher._count = list(asked), 2
    assert launcher._watch() == ends
