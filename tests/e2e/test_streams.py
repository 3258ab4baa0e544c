"""Unusual streams and environments lead to the product or to one message, and never to a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Command
from tests.e2e.jobs import QUICKLY, ROOT, job
from zerodrift.train.loop.start import train

COMMAND = f"{sys.executable} -m zerodrift"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    held = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command, nothing = ["bash", "-c", line], subprocess.DEVNULL
    return subprocess.run(
        command, cwd=ROOT, env=held, text=True, capture_output=True, timeout=120, stdin=nothing
    )


def plain(done: subprocess.CompletedProcess[str]) -> None:
    for text in (done.stdout, done.stderr):
        assert "Traceback" not in text and "Exception ignored" not in text, text


REDIRECTED = {
    "support > /dev/full": (2, "`stdout`: must accept the output"),
    "support | head -c 1; exit ${PIPESTATUS[0]}": (0, ""),
    "support >&-": (2, "`stdout`: must be open"),
}
"""A line -> its end; a closed pipe is no error."""


@pytest.mark.parametrize("line", REDIRECTED)
def test_streams_that_are_full_gone_or_closed_are_said_or_do_no_harm(line: str) -> None:
    code, said = REDIRECTED[line]
    done = shell(f"{COMMAND} {line}")
    plain(done)
    assert done.returncode in ((code, 141) if "head" in line else (code,))
    assert said in done.stderr if said else not done.stderr


def test_a_run_whose_reader_goes_says_so_and_can_go_on(tmp_path: Path) -> None:
    file = job(tmp_path, "slow", steps=4, run={"checkpoint_every": 1})
    command = Command("train", file, *QUICKLY, is_read=True)
    assert command.first_line()
    _, said = command.communicate()
    assert command.returncode == 2 and "`stdout`: must stay open" in said and "Traceback" not in said
    assert train(str(file), QUICKLY[1:]) == 0
