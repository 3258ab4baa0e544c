"""Run a command with a time limit, and end it together with all processes that it started.

Invariant: whatever happens here, none of its processes is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

GRACE = 10.0
"""Seconds between SIGINT and SIGKILL."""


def run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, printed: IO[str], limit: float
) -> int | None:
    """Return the exit code; None for a command that took longer than `limit` seconds."""
    child = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    """Send SIGINT to the process and its descendants, then kill those that are left, in any session."""
    started = descendants(child.pid)
    try:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        there = there_are()
        for pid, (_, began) in started.items():
            if pid in there and there[pid][1] == began:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        child.wait()


def there_are() -> dict[int, tuple[int, int]]:
    """Return (parent, start time) of every running process; empty where there is no /proc."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[int(stat.parent.name)] = int(fields[1]), int(fields[19])
    return found


def descendants(pid: int) -> dict[int, tuple[int, int]]:
    there, found, parents = there_are(), {}, {pid}
    while parents:
        children = {each: facts for each, facts in there.items() if facts[0] in parents}
        found.update(children)
        parents = set(children)
    return found
