"""Streams and surroundings that are not as usual: the product or one message, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import QUICKLY, ROOT, job
from zerodrift.cli import app
from zerodrift.train.loop.start import train

COMMAND = f"{sys.executable} -m zerodrift"
PRINTERS = ("support", "--help", "--version", "plan --help")


def shell(line: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """A command line; None takes a variable away."""
    held = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env={name: value for name, value in held.items() if value is not None},
        text=True,
        capture_output=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def plain(done: subprocess.CompletedProcess[str]) -> None:
    for text in (done.stdout, done.stderr):
        assert "Traceback" not in text and "Exception ignored" not in text, text


@pytest.mark.parametrize("verb", PRINTERS)
def test_a_stdout_that_is_full_is_said(verb: str) -> None:
    done = shell(f"{COMMAND} {verb} > /dev/full")
    plain(done)
    assert done.returncode == 2 and "`stdout`: must take what is printed" in done.stderr


@pytest.mark.parametrize("verb", PRINTERS)
def test_a_reader_who_has_gone_is_no_error(verb: str) -> None:
    done = shell(f"{COMMAND} {verb} | head -c 1; exit ${{PIPESTATUS[0]}}")
    plain(done)
    assert done.returncode in (0, 141) and not done.stderr


def test_closed_streams_are_said_or_do_no_harm() -> None:
    done = shell(f"{COMMAND} support >&-")
    plain(done)
    assert done.returncode == 2 and "`stdout`: must be open" in done.stderr
    done = shell(f"{COMMAND} support 2>&- <&-")
    plain(done)
    assert done.returncode == 0 and "native" in done.stdout


ODD: tuple[dict[str, str | None], ...] = (
    {"HOME": "/nowhere", "TMPDIR": "/nowhere"},
    {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    {"COLUMNS": "20", "TERM": "dumb"},
    {"XDG_CACHE_HOME": "/dev/null", "CXX": "/nowhere/c++"},
)
ALL: dict[str, str | None] = {name: value for held in ODD for name, value in held.items()}


@pytest.mark.parametrize(
    "surroundings",
    [
        pytest.param(ALL, id="all"),
        *(
            pytest.param(held, id=next(iter(held)), marks=pytest.mark.slow)
            for held in (*ODD, {**ALL, "HOME": None}, {"HOME": None})
        ),
    ],
)
def test_a_job_is_done_in_odd_surroundings(surroundings: dict[str, str | None], tmp_path: Path) -> None:
    file = job(tmp_path, steps=1)
    done = shell(f"{COMMAND} train {file} {' '.join(QUICKLY)}", **surroundings)
    plain(done)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "export").is_dir()


def test_a_run_whose_reader_goes_says_so_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = job(tmp_path, "slow", steps=4, run={"checkpoint_every": 1})
    done = shell(f"{COMMAND} train {file} {' '.join(QUICKLY)} | head -n 1; exit ${{PIPESTATUS[0]}}")
    plain(done)
    assert done.returncode == 2 and "`stdout`: must stay open" in done.stderr
    monkeypatch.chdir(ROOT)
    assert train(str(file), QUICKLY[1:]) == 0


@pytest.mark.parametrize("place", ["cache", "run", "run/metrics.jsonl", "run/report.html", "run/export"])
def test_a_place_that_is_taken_is_named(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file where a folder is to be, or a folder where a file is."""
    file = job(tmp_path, steps=1)
    taken = tmp_path / place
    taken.parent.mkdir(exist_ok=True)
    if "." in taken.name:
        taken.mkdir()
    else:
        taken.write_text("somebody's")
    monkeypatch.chdir(ROOT)
    assert app(["train", str(file)], standalone_mode=False) == 2  # as whoever starts it would see
    said = capfd.readouterr().err
    assert f"{taken.name}" in said and "Traceback" not in said
    assert taken.is_dir() or taken.read_text() == "somebody's"
