"""Unusual streams and environments lead to the product or to one message, and never to a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Command
from tests.e2e.jobs import QUICKLY, ROOT, job
from zerodrift.cli import app
from zerodrift.train.loop.start import train

COMMAND = f"{sys.executable} -m zerodrift"


def shell(line: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run a command line; None removes a variable."""
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


REDIRECTED = {
    "--help > /dev/full": (2, "`stdout`: must take what is printed"),
    "support > /dev/full": (2, "`stdout`: must take what is printed"),
    "support | head -c 1; exit ${PIPESTATUS[0]}": (0, ""),
    "support >&-": (2, "`stdout`: must be open"),
    "support 2>&- <&-": (0, ""),
}
"""A line -> its end; a closed pipe is no error."""


@pytest.mark.parametrize("line", REDIRECTED)
def test_streams_that_are_full_gone_or_closed_are_said_or_do_no_harm(line: str) -> None:
    code, said = REDIRECTED[line]
    done = shell(f"{COMMAND} {line}")
    plain(done)
    assert done.returncode in ((code, 141) if "head" in line else (code,))
    assert said in done.stderr if said else not done.stderr
    assert "native" in done.stdout or "<&-" not in line


ODD: dict[str, str | None] = {
    "HOME": "/nowhere",
    "TMPDIR": "/nowhere",
    "LANG": "C",
    "LC_ALL": "C",
    "PYTHONIOENCODING": "ascii",
    "PYTHONUTF8": "0",
    "COLUMNS": "20",
    "TERM": "dumb",
    "XDG_CACHE_HOME": "/dev/null",
    "CXX": "/nowhere/c++",
}


@pytest.mark.parametrize("home", ["/nowhere", pytest.param(None, marks=pytest.mark.slow)])
def test_a_job_is_done_in_odd_surroundings(home: str | None, tmp_path: Path) -> None:
    file = job(tmp_path, steps=1)
    done = shell(f"{COMMAND} train {file} {' '.join(QUICKLY)}", **{**ODD, "HOME": home})
    plain(done)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "export").is_dir()


def test_a_run_whose_reader_goes_says_so_and_can_go_on(tmp_path: Path) -> None:
    file = job(tmp_path, "slow", steps=4, run={"checkpoint_every": 1})
    command = Command("train", file, *QUICKLY, is_read=True)
    assert command.first_line()
    _, said = command.communicate()
    assert command.returncode == 2 and "`stdout`: must stay open" in said and "Traceback" not in said
    assert train(str(file), QUICKLY[1:]) == 0


@pytest.mark.parametrize("place", ["cache", "run", "run/metrics.jsonl", "run/report.html", "run/export"])
def test_a_place_that_is_taken_is_named(
    place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file may be in the place of a folder, or a folder in that of a file."""
    file = job(tmp_path, steps=1)
    taken = tmp_path / place
    taken.parent.mkdir(exist_ok=True)
    if "." in taken.name:
        taken.mkdir()
    else:
        taken.write_text("somebody's")
    assert app(["train", str(file)], standalone_mode=False) == 2  # as whoever starts it would see
    said = capfd.readouterr().err
    assert f"{taken.name}" in said and "Traceback" not in said
    assert taken.is_dir() or taken.read_text() == "somebody's"
