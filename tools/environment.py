"""Make a Python environment: the locked one of `make`, or one of given packages for a tool's own trial.

    python3 tools/environment.py .venv --torch torch==2.13.0   # requirements/lock.txt, and this torch

Needs nothing but Python 3.10 with `venv`. Everything that pip says is in a log beside the environment. When
something fails, one message says what happened and what to do, and the same command can be called again.

Invariant: an environment that is used was made to its end, from what is asked for today.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "lock.txt"
TORCH = ROOT / "requirements" / "torch.txt"


class SetupError(Exception):
    """An environment could not be made; the message says why and what to do."""


def log_of(home: Path) -> Path:
    return home.with_name(f"{home.name}.log")


def make_locked(home: Path, torch: str, index: Sequence[str], extra: str) -> Path:
    """Make the environment of the lock with a torch, and zerodrift to be edited; return its interpreter.

    An extra is installed in the newest versions that go with the lock.
    """
    # One version of torch comes in several builds, for CPUs and for CUDA, so its pins have no hashes.
    pinned = torch in TORCH.read_text().splitlines()
    torch_pins = ["--constraint", str(TORCH)] if pinned else []
    steps = [
        ["--no-deps", "--require-hashes", "--requirement", str(LOCK)],
        [*torch_pins, *index, torch],
        ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
    ]
    if extra:
        steps.append(["--no-build-isolation", "--editable", f"{ROOT}[{extra}]"])
    return _make(home, sys.executable, steps)


def make_environment(home: Path, python: str, *packages: Sequence[str], day: str = "") -> Path:
    """Make an environment with lists of packages, installed one list after the other; return its interpreter.

    One that was made from the same lists, and on the same day where a day is given, is used again.
    """
    asked = json.dumps([python, packages, day])
    interpreter, record = home / "bin" / "python", home / "made-of.json"
    if record.exists() and record.read_text() == asked:
        return interpreter
    _make(home, python, [["--upgrade", "pip"], *packages])
    record.write_text(asked)
    return interpreter


def _make(home: Path, python: str, steps: Sequence[Sequence[str]]) -> Path:
    progress = Progress(home)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        log = log_of(home).open("w")
    except OSError as error:
        raise SetupError(f"{home}: cannot be written ({error.strerror}). {_ELSEWHERE}") from error
    with log:
        _run(home, [python, "-m", "venv", "--clear", str(home)], log, progress)
        interpreter = home / "bin" / "python"
        pip = [str(interpreter), "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
        for step in steps:
            _run(home, [*pip, "--disable-pip-version-check", *step], log, progress)
    progress.end()
    return interpreter


def _run(home: Path, command: Sequence[str], log: Iterator[str], progress: Progress) -> None:
    print(f"$ {' '.join(command)}", file=log, flush=True)
    said = []
    environment = {**os.environ, "DS_BUILD_OPS": "0", "PYTHONUNBUFFERED": "1"}
    try:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
    except OSError as error:
        raise SetupError(f"`{command[0]}` does not start ({error.strerror})") from error
    with child:
        try:
            for line in child.stdout:
                log.write(line)
                log.flush()
                said.append(line)
                progress.show(line)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        progress.end(done=False)
        raise SetupError(explain(home, "".join(said)))


# --- what went wrong --------------------------------------------------------------------------------------

_ELSEWHERE = "Name another folder: make VENV=/path/to/folder."
_AGAIN = "Then call the same command again; complete downloads are kept in pip's cache."

_CAUSES = (
    ("No space left on device", "the disk is full", f"Make room: some 3 GB, or 8 GB with CUDA. {_AGAIN}"),
    (
        "DO NOT MATCH THE HASHES|Hash mismatch",
        "a package is not the one in requirements/lock.txt: a proxy or a mirror changed it or cut it short",
        f"Check pip's settings (`pip config list`, PIP_INDEX_URL, HTTPS_PROXY). {_AGAIN}",
    ),
    (
        r"Retrying \(|ConnectionError|Connection broken|IncompleteRead|incomplete-download|Read timed out"
        "|ReadTimeout|ProxyError|ProtocolError|SSLError|SSLCertVerificationError|RemoteDisconnected"
        "|Network is unreachable|HTTP error|HTTPError",
        "the package index could not be reached, or the connection ended",
        f"Check the network and pip's settings (`pip config list`, PIP_INDEX_URL, HTTPS_PROXY). {_AGAIN}",
    ),
    (
        "No matching distribution|Could not find a version",
        "the package index has no such version for this Python and platform",
        "Python 3.10 to 3.13 on Linux and macOS are tested: make PYTHON=python3.12. "
        "Of a mirror: PIP_INDEX_URL names another index.",
    ),
    (
        "Permission denied|Read-only file system|PermissionError",
        "the folder cannot be written",
        _ELSEWHERE,
    ),
)


def explain(home: Path, said: str) -> str:
    """Return one message from all that a command said: what failed, on which package, and what to do."""
    got = re.findall(r"^\s*(?:Collecting|Downloading|Obtaining) (\S+)", said, re.MULTILINE)
    errors = re.findall(r"^(?:ERROR: |\w*Error: )(.+)", said, re.MULTILINE)
    reason = (
        errors[-1].strip()[:200] if errors else said.strip().splitlines()[-1][:200] if said.strip() else ""
    )
    for pattern, cause, advice in _CAUSES:
        if re.search(pattern, said):
            reason = f"{cause}{f', at {got[-1]}' if got else ''}. {advice}\nThe last error: {reason}"
            break
    return f"{home} is not set up: {reason}\nAll of it: {log_of(home)}"


def wrapped(text: str) -> str:
    """Return a message in lines that fit the terminal."""
    width = min(shutil.get_terminal_size().columns, 100)
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in text.splitlines())


def check_python() -> None:
    """Refuse a Python that has no `venv`, as Debian's without its package."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        number = "{}.{}".format(*sys.version_info)
        raise SetupError(
            f"{sys.executable} has no `venv`. On Debian and Ubuntu: apt-get install python{number}-venv. "
            "Another Python: make PYTHON=/path/to/python"
        )


# --- progress ---------------------------------------------------------------------------------------------


class Progress:
    """A line of progress: rewritten in a terminal, printed once at either end elsewhere."""

    def __init__(self, home: Path) -> None:
        self._home, self._began, self._collected = home, time.monotonic(), 0
        self._is_terminal = sys.stderr.isatty()
        names = re.findall(r"^([\w.-]+)==(?!.*(?:win32|emscripten'))", LOCK.read_text(), re.MULTILINE)
        self._total = len(set(names))
        print(
            f"Setting up {home}, for one to five minutes; what pip says is in {log_of(home)}", file=sys.stderr
        )

    def show(self, line: str) -> None:
        """Show the step that a line of pip's output stands for."""
        if not self._is_terminal:
            return
        if package := re.match(r"Collecting (\S+)", line):
            self._collected = min(self._collected + 1, self._total)
            elapsed = time.monotonic() - self._began
            left = elapsed / self._collected * (self._total - self._collected)
            self._write(f"{self._collected} of {self._total} packages, {left:.0f} s left: {package[1]}")
        elif download := re.match(r"\s*Downloading (\S+).*(\(.*\))", line):
            self._write(f"downloading {download[1].rpartition('/')[2]} {download[2]}")
        elif line.startswith("Installing collected"):
            self._write("installing")

    def end(self, *, done: bool = True) -> None:
        """End the line."""
        if self._is_terminal:
            self._write("")
        if done:
            print(f"{self._home} is ready, after {time.monotonic() - self._began:.0f} s", file=sys.stderr)

    def _write(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r{text[:width]:{width}}\r")
        sys.stderr.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the locked environment.")
    parser.add_argument("home", type=Path, metavar="FOLDER")
    parser.add_argument("--torch", required=True, metavar="REQUIREMENT")
    parser.add_argument("--index", default="", metavar="OPTIONS", help="of pip, for torch alone")
    parser.add_argument("--extra", default="", metavar="NAME", help="of pyproject.toml, beside the lock")
    asked = parser.parse_args()
    try:
        check_python()
        make_locked(asked.home, asked.torch, asked.index.split(), asked.extra)
    except SetupError as error:
        print(wrapped(str(error)), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped: {asked.home} is not set up. The same command begins anew.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
