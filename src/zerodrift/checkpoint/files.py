"""Read regular files, and write files and folders that appear as a whole or not at all.

Nothing but regular files is opened, since reading a pipe may never end. Errors of the system become
CheckpointErrors. Folders and files are written under another name, and renamed once they are complete:

models/a                       a folder
models/.a.writing-4f1c09ab     under construction, or left by a writer that died: the next writer removes it
models/.a.old-4f1c09ab         being replaced

A lock file names its owner, and is broken once the owner is gone. A process on the same machine is identified
by its number and start time. A process on another machine counts as gone if it has not touched the lock file
for STALE seconds, by the clock of the file system.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from zerodrift.errors import CheckpointError, ZerodriftError, said
from zerodrift.files import kind_of
from zerodrift.record import decode, encode

if TYPE_CHECKING:
    from typing_extensions import Self

Kind = Literal["file", "folder", "nothing"]
SHOWN = 200
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def short(text: object) -> str:
    """Return a path or name as an error shows it, cut if it is very long."""
    plain = str(text)
    return plain if len(plain) <= SHOWN else f"{plain[: SHOWN // 2]}...{plain[-SHOWN // 4 :]}"


def kind_at(path: Path) -> Kind:
    """Return the kind of a path, with links followed."""
    must = "must be a file or folder"
    try:
        kind = kind_of(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise CheckpointError(short(path), must, got="a link to nothing") from None
        return "nothing"
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if kind not in ("", "a folder"):
        raise CheckpointError(short(path), must, got=kind)
    return "folder" if kind else "file"


def is_folder(path: Path, must: str) -> bool:
    """Return True for a folder and False for nothing; `must` is the clause that refuses a file."""
    kind = kind_at(path)
    if kind == "file":
        raise CheckpointError(short(path), must, got="a file")
    return kind == "folder"


def list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error


def own_file(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint's file: a regular file in the folder itself, no link."""
    path = folder / name
    if not name or name in (".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise CheckpointError(short(folder), "must name files that are in it", got=short(repr(name)))
    kind = kind_of(path.lstat().st_mode)
    if kind:
        do = "Copy the checkpoint as files."
        raise CheckpointError(short(path), "must be a file of the checkpoint itself", got=kind, do=do)
    return path


def open_own(folder: Path, name: str) -> IO[bytes]:
    try:
        return own_file(folder, name).open("rb")
    except OSError as error:
        raise unreadable(folder / short(name), error) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else said(error)
    return CheckpointError(short(path), "must be readable", got=reason)


@contextmanager
def writing(path: Path, only: Collection[int] = ()) -> Iterator[None]:
    """Turn errors of the system while `path` is written into CheckpointErrors; with `only`, those numbers."""
    try:
        yield
    except ZerodriftError:
        raise
    except Exception as error:
        refused = refusal(error)
        if refused is None or (only and refused.errno not in only):
            raise
        raise unwritable(path, refused) from error


def full_disk_named(path: Path) -> AbstractContextManager[None]:
    """Turn a full disk into a CheckpointError, around work that also reads."""
    return writing(path, only=FULL)


def refusal(error: BaseException | None) -> OSError | None:
    """Return the OSError behind an exception. Writers in Rust or C name its number in their text alone."""
    if isinstance(error, OSError):
        return error
    while error is not None:
        if isinstance(error, OSError) and error.errno in (*FULL, errno.EIO, errno.EROFS):
            return error
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is not None:
            return OSError(int(number[1]), os.strerror(int(number[1])))
        error = error.__cause__ or error.__context__
    return None


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a refused write, with the free space if the disk is full."""
    where = error.filename if isinstance(error.filename, str) else str(path)
    is_full = error.errno in FULL
    todo = f"{free(path)}Make room, or choose another disk." if is_full else "Choose another folder."
    return CheckpointError(short(where), "must be written", got=error.strerror or said(error), do=todo)


def free(path: Path) -> str:
    """Return a sentence on the free space at a path, or at its nearest parent that exists."""
    for place in (path, *path.parents):
        try:
            return f"{shutil.disk_usage(place).free / 1e9:.3f} GB are free in {short(place)}. "
        except OSError:
            continue
    return ""


# --- folders and files that appear whole --------------------------------------------------------------------


LOCK = ".lock"
STALE = 600.0
"""Seconds without a touch after which a writer on another machine counts as gone."""
MODEL = (".safetensors", ".safetensors.index.json", ".bin")
"""Suffixes of files that make a folder a model's."""


@dataclass(slots=True)
class NewFolder:
    """A folder under construction, and the lock of its writer. One process creates, publishes and removes it;
    others may write into `path`."""

    path: Path
    home: Path
    aside: Path
    """Name of the replaced folder until it is removed."""
    lock: Lock
    _published: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def publish(self) -> None:
        """Rename the folder to its name; the folder that had the name is restored if this fails."""
        (self.path / LOCK).unlink(missing_ok=True)
        sync_folder(self.path)
        if os.path.lexists(self.home):
            self.home.rename(self.aside)
        try:
            self.path.rename(self.home)
        except BaseException:
            if os.path.lexists(self.aside):
                self.aside.rename(self.home)
            raise
        sync_folder(self.home.parent)
        self._published = True

    def remove(self) -> None:
        """Remove the replaced folder, or this one if it was not published, and release the lock. Safe to call
        twice."""
        shutil.rmtree(self.aside if self._published else self.path, ignore_errors=True)
        self.lock.release()


def new_folder(target: Path, overwrite: bool = False) -> NewFolder:
    """Begin a folder at `target`; with `overwrite` it replaces an exported model."""
    _check_target(target, overwrite)
    home = target.resolve() if target.is_symlink() else target  # a link itself is never renamed away
    key = uuid.uuid4().hex[:8]
    path = home.with_name(f".{home.name}.writing-{key}")
    with writing(home):
        home.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(home)
        _check_target(home, overwrite)  # again, since a replaced folder may have been restored
        path.mkdir()
        try:
            return NewFolder(path, home, home.with_name(f".{home.name}.old-{key}"), Lock.take(path))
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise


def _remove_leftovers(home: Path) -> None:
    key = "[0-9a-f]" * 8
    own = glob.escape(f".{home.name}.")
    for left in home.parent.glob(f"{own}writing-{key}"):
        Lock.take(left)  # raises if its writer is alive
        shutil.rmtree(left, ignore_errors=True)
    for left in home.parent.glob(f"{own}old-{key}"):
        if home.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.rename(home)  # its replacement was never published


def _check_target(target: Path, overwrite: bool) -> None:
    """Refuse a folder with contents, unless `overwrite` is set and it is a model's."""
    there = list_folder(target) if is_folder(target, "must be a folder, or not exist") else []
    if there and not overwrite:
        must, got = "must not exist, or be empty", "a folder that is not empty"
        raise CheckpointError(short(target), must, got=got, do="Choose another, or say `overwrite`.")
    if there and not any(path.name.endswith(MODEL) for path in there):
        must = "must be a model's folder, with `*.safetensors`, to be overwritten as a whole"
        got = short(", ".join(path.name for path in there))
        raise CheckpointError(short(target), must, got=got, do="Choose another folder.")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file gets its name when the block ends without an error."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with writing(path):
            yield partial
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- the lock of a folder -----------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Lock:
    """The lock of one folder, held by this process."""

    path: Path
    owner: LockOwner

    @staticmethod
    def take(folder: Path) -> Lock:
        """Take the lock, or raise CheckpointError with its owner."""
        path = folder / LOCK
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
            os.utime(self.path)

    @property
    def held(self) -> bool:
        """True unless another process has broken the lock."""
        return _read(self.path) == self.owner

    def release(self) -> None:
        """Give the lock back. Safe to call twice."""
        if self.held:
            self.path.unlink(missing_ok=True)


def _create(path: Path, text: str) -> bool:
    """Create the file with its text in one step, or return False if there is one."""
    draft = path.with_name(f"{LOCK}-{uuid.uuid4().hex}")
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
    probe = path.with_name(f"{LOCK}-{uuid.uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime < STALE
    except FileNotFoundError:
        return False
    finally:
        probe.unlink()


def _break(path: Path, seen: LockOwner | None) -> None:
    """Remove a dead owner's lock; put it back if another process has taken it meanwhile."""
    aside = path.with_name(f"{LOCK}-{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if _read(aside) != seen:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()


def _born(pid: int) -> str:
    """Return the start time of a process, `""` if there is none, and `alive` on a system without `/proc`."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # The name in brackets may hold anything; the state and, as the 20th field, the start come after it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
