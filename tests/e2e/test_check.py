"""`check` and `diff` over commands, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command, run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/check/bf16.py"
PAGE = (ROOT / "docs/check.md").read_text()


def checked(
    folder: Path, text: str, options: Sequence[str] = (), python: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    command = (sys.executable, *python, "train.py")
    return run("check", *options, "--", *command, folder=folder, timeout=250, COLUMNS="80")


def plain(text: str) -> str:
    """Remove the versions, which depend on the machine."""
    return re.sub(r"libraries .*", "libraries", text)


def test_the_page_shows_what_is_printed_saved_expected_and_compared(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("bf16.json", "fp32.json", "bf16.html")]
    command = ("check", "--save", files[0], "--html", files[2], "--", sys.executable, EXAMPLE)
    done = run(*command, folder=tmp_path, COLUMNS="80")
    assert [done.stderr.count(f"wrote {file}\n") for file in files] == [1, 0, 1]
    assert done.returncode == 0, done.stderr
    (shown,) = re.findall(r"bf16\.py\n(zerodrift check\n.*?)```", PAGE, re.DOTALL)
    assert plain(done.stdout) == "\n" + plain(shown)
    assert "<html" in files[2].read_text() and "no-master" in files[2].read_text()
    wider = tmp_path / "fp32.py"
    kept = tmp_path / "kept.json"  # where the run moves the table that it is expected to be like
    moved = f"import os\nos.rename({str(files[0])!r}, {str(kept)!r})\n" + EXAMPLE.read_text()
    wider.write_text(moved.replace(".to(torch.bfloat16)", "") + "raise SystemExit(5)\n")
    held = ("--json", "--expect", files[0], "--save", files[1])
    done = run("check", *held, "--", sys.executable, wider, folder=tmp_path)
    assert done.returncode == 3, done.stderr
    kinds = {(item["kind"], item["column"]) for item in json.loads(done.stdout)["findings"]}
    assert ("not-as-expected", "master") not in kinds and ("not-as-expected", "state") in kinds
    done = run("diff", kept, files[1], folder=tmp_path)
    assert done.returncode == 3 and "storage was bf16, is fp32" in done.stdout
    done = run("diff", kept, kept, folder=tmp_path)
    assert done.returncode == 0 and "the same" in done.stdout


LOOP = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(9):
    model(torch.randn(1, 2)).sum().backward()
    optimizer.step()
    {then}
"""
STEPS = LOOP.format(then="")
AGAIN = """
import os, sys, torch
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, __file__, "again"])
"""

BAD = {
    "crash": (LOOP.format(then="1 / (1 - step)"), 2, "Rank 0 crashed after 2 of 3 steps"),
    "trains nothing": ("import torch\n", 2, "no training"),
    "no torch": ("print('hello')\n", 2, "no Python process that imports torch"),
    "never steps": (STEPS.replace("optimizer.step()", ""), 2, "no step of a torch optimizer"),
    "killed": (STEPS.replace("for", "import os; os.kill(os.getpid(), 9)\nfor"), 2, "signal 9"),
    "becomes another": (AGAIN + STEPS, 0, "3 optimizer steps"),
    "forks": (LOOP.format(then="import os; os.fork() or os._exit(0)"), 0, "3 optimizer steps"),
    "takes too long": ("import time, torch\ntime.sleep(1000)\n", 2, "time limit; got fewer in 5 seconds"),
    "ignores its environment": (STEPS, 2, "PYTHONPATH"),
}  # fmt: skip
"""A script, the exit code, and what must be printed."""

STARTED: dict[str, dict[str, Any]] = {
    "takes too long": {"options": ("--timeout", "5")},
    "ignores its environment": {"python": ("-I",)},
}
OFTEN = ("crash", "no torch")
"""Cases that are not marked slow; each starts a Python that imports torch."""


@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.slow) for case in BAD]
)
def test_a_command_that_cannot_be_seen_to_the_end_says_why(case: str, tmp_path: Path) -> None:
    text, code, said = BAD[case]
    done = checked(tmp_path, text, **STARTED.get(case, {}))
    words = re.sub(r"\s+", " ", done.stdout + done.stderr)
    assert done.returncode == code and said in words, words
    assert "Traceback" not in done.stderr or case == "crash"


def test_a_signal_to_check_ends_the_command_too(tmp_path: Path) -> None:
    text = "import os, pathlib, time\npathlib.Path('pid').write_text(f'{os.getpid()}.')\ntime.sleep(600)\n"
    check, pid = Command("check", "--", sys.executable, "-c", text, folder=tmp_path), tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text().endswith(".")):
        assert time.monotonic() < deadline and check.poll() is None
        time.sleep(0.02)
    check.send_signal(signal.SIGTERM)
    check.communicate(timeout=30)
    assert check.returncode == 128 + 15
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()[:-1]), 0)
