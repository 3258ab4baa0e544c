"""Let one process write to a folder: a lock file names its owner, and is broken once the owner is gone.

A process on the same machine is identified by its number and start time. One on another machine counts as
gone when the file was not touched for STALE seconds, by the clock of the file system.
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
    """The process that holds a lock."""

    host: str
    pid: int
    born: str
    """Start time of the process in the kernel's count, because process numbers are used again."""
    since: str
    """ISO 8601, UTC."""
    key: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lock:
    """The lock of one folder, held by this process."""

    def __init__(self, path: Path, owner: LockOwner) -> None:
        self._path, self._owner = path, owner

    @staticmethod
    def take(folder: Path) -> Lock:
        """Take the lock, or raise CheckpointError with its owner."""
        path = folder / NAME
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        owner = LockOwner(socket.gethostname(), os.getpid(), _born(os.getpid()), since, uuid.uuid4().hex)
        for _ in range(8):
            if _create(path, json.dumps(encode(owner))):
                return Lock(path, owner)
            other = _read(path)
            if other is not None and _is_alive(other, path):
                do = "Wait for it, or save to another folder."
                raise CheckpointError(folder, "must have one writer", got=other, do=do)
            _break(path, other)
        got = "a lock that was taken each time"
        raise CheckpointError(path, "must be free within 8 attempts", got=got, do="Try again.")

    def touch(self) -> None:
        """Show other machines that the owner is alive."""
        if self.held:
            os.utime(self._path)

    @property
    def held(self) -> bool:
        """True unless another process has broken the lock."""
        return _read(self._path) == self._owner

    def release(self) -> None:
        """Give the lock back. Safe to call twice."""
        if self.held:
            self._path.unlink(missing_ok=True)


def _create(path: Path, text: str) -> bool:
    """Create the file with its text in one step, or return False if there is one."""
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


def _is_alive(owner: LockOwner, path: Path) -> bool:
    if owner.host == socket.gethostname():
        return owner.born == _born(owner.pid)
    probe = path.with_name(f"{NAME}-{uuid.uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime < STALE
    except FileNotFoundError:
        return False
    finally:
        probe.unlink()


def _break(path: Path, seen: LockOwner | None) -> None:
    """Remove a dead owner's lock; put it back if another process was quicker and took a new one."""
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
    """Return the start time of a process, `""` if there is none."""
    try:
        # The name in brackets may hold anything; the state and, as the 20th field, the start come after it.
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
