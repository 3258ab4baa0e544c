"""Runs somebody's command with a watcher in each of its Python processes, and collects what they saw.

The command runs as it stands, with one folder before its `PYTHONPATH`: Python imports the `sitecustomize` in
it at its start, which imports the one that would have been there, and waits for torch to be imported.

Invariant: no process of the command outlives the check, unless it was to go on and has not ended by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerodrift.errors import ZerodriftError
from zerodrift.observer.seen import SeenProcess

END = "end"
"""File that says that every process may end."""

_STRAGGLING = 60.0
"""Seconds between the first rank that has seen its steps and the last."""

_GRACE = 10.0
"""Seconds between asking processes to end and ending them."""


@dataclass
class SeenRun:
    """What the processes of a command saw."""

    code: int
    """The command's exit code; that of a signal is negative. 0 where the check ended it."""
    processes: list[SeenProcess] = field(default_factory=list)
    """Those that took a step, by rank."""
    idle: list[SeenProcess] = field(default_factory=list)
    """Those that imported torch and took none."""
    failures: list[str] = field(default_factory=list)
    """Why a process could not be watched."""


def run(
    command: Sequence[str],
    steps: int,
    keep_going: bool = False,
    stdout: int | None = None,
    waiting: Callable[[], Any] = lambda: None,
) -> SeenRun:
    """Run it, and return when its processes have ended."""
    with tempfile.TemporaryDirectory(prefix="zerodrift-check-") as folder:
        place = Path(folder)
        (place / "site").mkdir()
        (place / "seen").mkdir()
        (place / "site" / "sitecustomize.py").write_text(_start(place / "seen", steps, keep_going))
        paths = [str(place / "site"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        try:
            child = subprocess.Popen(command, env=environment, stdout=stdout, start_new_session=True)
        except OSError as error:
            raise ZerodriftError(
                command[0], "must be a command that can be run", got=error.strerror or error
            ) from None
        try:
            code = _wait(child, place / "seen", keep_going, waiting)
        finally:
            _end(child)
        return _collected(code, place / "seen")


def _wait(child: subprocess.Popen[bytes], seen: Path, keep_going: bool, waiting: Callable[[], Any]) -> int:
    """Until the command ends, or has been seen by all of its ranks."""
    first: float | None = None
    while child.poll() is None:
        waiting()
        time.sleep(0.1)
        if keep_going:
            continue
        reports = [report for report in _reports(seen) if report.ended == "steps"]
        if not reports:
            continue
        first = first or time.monotonic()
        world = max(report.world for report in reports)
        if len(reports) >= world or time.monotonic() - first > _STRAGGLING:
            (seen / END).touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE)
            _end(child)
            return 0
    return child.returncode


def _end(child: subprocess.Popen[bytes]) -> None:
    """Every process of the command that is still there: asked first, then killed."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sent)
        except (ProcessLookupError, PermissionError):
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE)
        if sent is signal.SIGTERM:
            time.sleep(0.2)
    child.wait()


def _reports(seen: Path) -> list[SeenProcess]:
    return [SeenProcess.from_json(json.loads(path.read_text())) for path in sorted(seen.glob("*.json"))]


def _collected(code: int, seen: Path) -> SeenRun:
    reports = _reports(seen)
    stepped = [report for report in reports if report.steps]
    together = [report for report in stepped if report.world > 1]
    return SeenRun(
        code=code,
        processes=sorted(together or stepped, key=lambda report: report.rank),
        idle=[report for report in reports if not report.steps],
        failures=[path.read_text() for path in sorted(seen.glob("*.failed"))],
    )


def _start(seen: Path, steps: int, keep_going: bool) -> str:
    """The text of `sitecustomize.py`. It may run in a Python that has no zerodrift: then ours is found."""
    package = Path(__file__).resolve().parents[1]
    return _START.format(
        package=str(package), seen=str(seen), settings=repr((str(seen), steps, keep_going)), line=repr("\n")
    )


_START = '''\
import importlib.machinery, importlib.util, os, sys

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]


class _Zerodrift:
    """Found where no other is."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "zerodrift":
            folder = {package!r}
            return importlib.util.spec_from_file_location(
                name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
            )


def _watch():
    sys.meta_path.append(_Zerodrift)
    from zerodrift.observer.imports import when_imported

    def begin(torch):
        try:
            from zerodrift.observer.process import begin

            begin(*{settings})
        except Exception as error:
            _failed(error)

    when_imported("torch", begin)


def _failed(error):
    with open(os.path.join({seen!r}, str(os.getpid()) + ".failed"), "w") as file:
        file.write(sys.executable + ": " + type(error).__name__ + ": " + str(error))


try:
    _watch()
except Exception as error:
    _failed(error)

_other = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _other is not None and _other.loader is not None:
    _module = importlib.util.module_from_spec(_other)
    sys.modules["sitecustomize"] = _module
    _other.loader.exec_module(_module)
'''
