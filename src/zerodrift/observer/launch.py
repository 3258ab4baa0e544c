"""Runs somebody's command with a watcher in each of its Python processes, and collects what they saw.

The command runs as it stands. How something is put into every process is `startup`'s business; what is put
there waits for torch to be imported (`process.py`).

Invariant: no process of the command outlives the check, unless it was to go on and has not ended by itself.
Where the check is killed, each ends when it has seen its steps.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerodrift.files import locked
from zerodrift.observer.seen import SeenProcess
from zerodrift.startup import Start, failures, spawn, starting

END = "end"
"""File that says that every process may end."""

HELD = "held"
"""File that is locked while the check is there."""

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
    silent: int = 0
    """Processes that were watched and left nothing."""
    late: bool = False
    """Whether the check ended it for its time was over."""


def run(
    command: Sequence[str],
    steps: int,
    keep_going: bool = False,
    stdout: int | None = None,
    timeout: float | None = None,
) -> SeenRun:
    """Run it, and return when its processes have ended, or when these seconds are over."""
    start = Start("zerodrift.observer.start", "watch_with_torch", (steps, keep_going))
    with starting(start, "zerodrift-check-") as folder:
        seen = folder / "seen"
        seen.mkdir()
        with locked(seen / HELD):
            child = spawn(command, folder, stdout, apart=True)
            try:
                code = _wait(child, seen, keep_going, timeout)
            finally:
                _end(child)
        return _collected(code, folder, seen)


def _wait(child: subprocess.Popen[bytes], seen: Path, keep_going: bool, timeout: float | None) -> int | None:
    """Until the command ends, or has been seen by all of its ranks; None where that took too long."""
    first: float | None = None
    until = time.monotonic() + (math.inf if timeout is None else timeout)
    while child.poll() is None:
        if time.monotonic() > until:
            return None
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


def _collected(code: int | None, folder: Path, seen: Path) -> SeenRun:
    reports = _reports(seen)
    began = {path.stem for path in seen.glob("*.began")}
    stepped = [report for report in reports if report.steps]
    together = [report for report in stepped if report.world > 1]
    return SeenRun(
        code=code or 0,
        processes=sorted(together or stepped, key=lambda report: report.rank),
        idle=[report for report in reports if not report.steps],
        failures=failures(folder),
        silent=len(began - {path.stem for path in seen.glob("*.json")}),
        late=code is None,
    )
