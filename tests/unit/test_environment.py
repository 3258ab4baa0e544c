"""Environments: locked versions, reuse, and every failure as one message with advice."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools import ROOT, load_tool


@pytest.fixture(scope="module")
def environment() -> Any:
    return load_tool("environment")


def test_every_package_is_pinned_with_hashes() -> None:
    lock = (ROOT / "requirements" / "lock.txt").read_text()
    blocks = [block for block in re.split(r"\n(?=\S)", lock) if not block.startswith("#")]
    assert len(blocks) > 80
    assert not [block for block in blocks if not re.match(r"[\w.-]+==\S+[^\n]*\\\n\s+--hash=sha256:", block)]


def test_what_pyproject_asks_for_is_locked() -> None:
    """No import of the tests depends on the day."""
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is new in 3.11")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.match(r"[\w-]+", each)[0].lower() for each in asked} - {"zerodrift"}  # type: ignore[index]
    texts = [(ROOT / "requirements" / name).read_text() for name in ("lock.txt", "torch.txt")]
    pinned = set(re.findall(r"^([\w-]+)==", "\n".join(texts), re.MULTILINE))
    assert names <= pinned, names - pinned
    assert {"pip", "setuptools", "triton"} <= pinned


SAID = {
    "no network": (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'\n"
        "ERROR: No matching distribution found for absl-py==2.5.1\n",
        "the package index could not be reached",
    ),
    "a proxy that ends": (
        "Collecting numpy==2.4.6\n  Downloading numpy-2.4.6.whl (16.9 MB)\n"
        "ERROR: Exception:\nurllib3.exceptions.ProtocolError: ('Connection broken: IncompleteRead(100)')\n",
        "or the connection ended, at numpy-2.4.6.whl",
    ),
    "a proxy that changes": (
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n    rich==15.0.0:\n",
        "is not the one in requirements/lock.txt",
    ),
    "a full disk": ("ERROR: Could not install: [Errno 28] No space left on device\n", "the disk is full"),
    "an old index": (
        "ERROR: No matching distribution found for transformers==5.24.0\n",
        "the package index has no such version",
    ),
    "a folder": ("Error: [Errno 30] Read-only file system: '/x/.venv'\n", "the folder cannot be written"),
    "anything else": ("ERROR: it is Tuesday\n", "it is Tuesday"),
}


def test_what_pip_says_becomes_one_message(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for said, cause in SAID.values():
        message = environment.explain(Path("home"), said)
        assert message.startswith("home is not set up: ") and cause in message
        assert message.endswith("home.log") and "Traceback" not in message
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(environment.SetupError, match=r"apt-get install python3\.\d+-venv"):
        environment.check_python()


def play(tmp_path: Path) -> Path:
    """Put a script in Python's place: it records its arguments, and fails on `second` as long as it may."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/ran\n'
        f'mkdir -p {tmp_path}/home/bin\ncp "$0" {tmp_path}/home/bin/python\n'
        f'for last; do :; done\n[ "$last" != second ] || [ -e {tmp_path}/works ] || exit 1\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def test_an_environment_is_made_once(tmp_path: Path, environment: Any) -> None:
    """It is made again for another request, or if it was not completed."""
    home, python = tmp_path / "home", str(play(tmp_path))
    asked = (home, python, ["--pre", "torch"], ["first"], ["second"])
    with pytest.raises(environment.SetupError, match="is not set up"):
        environment.make_environment(*asked)
    (tmp_path / "works").touch()
    (tmp_path / "ran").unlink()
    assert environment.make_environment(*asked) == home / "bin" / "python"
    ends = [line.split()[-2:] for line in (tmp_path / "ran").read_text().splitlines()]
    assert ends[0] == ["--clear", str(home)] and ends[1:3] == [["--upgrade", "pip"], ["--pre", "torch"]]
    assert [end[-1] for end in ends[3:]] == ["first", "second"]
    for again, ran in ((asked, 5), (asked[:-1], 9)):
        assert environment.make_environment(*again)
        assert len((tmp_path / "ran").read_text().splitlines()) == ran


@pytest.mark.parametrize(
    ("python", "said"),
    [("echo Python 3.9.2; exit 1", "zerodrift needs Python 3.10 to 3.13"), ("", "is: not there")],
)
def test_make_names_a_python_that_will_not_do(python: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "python3.9"
    if python:
        script.write_text(f"#!/bin/sh\n{python}\n")
        script.chmod(0o755)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={script}", f"VENV={tmp_path}/venv"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    told = done.stdout + done.stderr
    assert done.returncode != 0 and said in told and "make demo PYTHON=python3.12" in told, told
    assert not (tmp_path / "venv").exists()
