"""One writer per folder: a lock file that says who writes, and when it may be broken.

The file is there while a save is under way. Whoever finds one looks whether its process is alive: on the
same machine by its number and the time it was started, elsewhere by whether the file is still being
touched. Times come from the file system alone, so clocks of machines that disagree do no harm.

Invariant: of two that try at once, one gets the lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from zerodrift.errors import CheckpointError
from zerodrift.record import decode, encode

NAME = ".lock"
STALE = 600.0
"""Seconds without a touch after which a writer on another machine counts as gone."""


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Who holds a lock."""

    host: str
    pid: int
    born: str
    """When the process was started, in the kernel's count: a number is used again, this is not."""
    since: str
    """When it took the lock: ISO 8601, UTC."""
    key: str
    """Drawn for this lock."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lock:
    """The lock of one folder, held by this process."""

    def __init__(self, path: Path, writer: LockOwner) -> None:
        self._path, self._writer = path, writer

    @staticmethod
    def take(folder: Path) -> Lock:
        """The lock, or CheckpointError with the name of who has it. A lock whose owner is gone is broken."""
        path = folder / NAME
        writer = LockOwner(socket.gethostname(), os.getpid(), _born(os.getpid()), _now(), uuid.uuid4().hex)
        text = json.dumps(encode(writer))
        for _ in range(8):
            if _create(path, text):
                return Lock(path, writer)
            other = _read(path)
            if other is not None and _alive(other, path):
                todo = "Wait for it, or save to another folder."
                raise CheckpointError(folder, "must have one writer", got=other, do=todo)
            _break(path, other)
        must = "must be free within 8 attempts"
        raise CheckpointError(path, must, got="a lock that was taken each time", do="Try again.")

    def touch(self) -> None:
        """Say that the owner is alive."""
        if self.held:
            os.utime(self._path)

    @property
    def held(self) -> bool:
        """Whether nobody has broken it."""
        return _read(self._path) == self._writer

    def release(self) -> None:
        """Give it back. Safe to call twice."""
        if self.held:
            self._path.unlink(missing_ok=True)


def _create(path: Path, text: str) -> bool:
    """Write the file in one step that fails where there is one: a lock is never seen half written."""
    draft = path.with_name(f"{NAME}-{uuid.uuid4().hex}")
    try:
        draft.write_text(text)
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def _read(path: Path) -> LockOwner | None:
    try:
        return decode(LockOwner, json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _alive(writer: LockOwner, path: Path) -> bool:
    if writer.host == socket.gethostname():
        return writer.born == _born(writer.pid)
    try:
        return _clock(path.parent) - path.stat().st_mtime < STALE
    except FileNotFoundError:
        return False


def _break(path: Path, seen: LockOwner | None) -> None:
    """Take a dead owner's lock away, and no other's: between the look and this, somebody may have been
    quicker and hold a new one."""
    aside = path.with_name(f"{NAME}-{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if _read(aside) != seen:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()


def _born(pid: int) -> str:
    """When a process was started, `""` for one that is not there."""
    try:
        # After the name in brackets, which may hold anything, come the state and, as the 20th, the start.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"


def _clock(folder: Path) -> float:
    """Now, by the clock of the file system."""
    probe = folder / f"{NAME}-{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
