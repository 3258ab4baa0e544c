"""Paths that somebody else names or shares: looked at before they are opened, and what the system says no to.

Opening a pipe waits for ever, reading a device never ends, and a link leads anywhere. What is no plain file
or folder is refused before it is opened, and whatever the operating system refuses becomes one sentence.

Invariant: nothing is opened that is not a regular file, and no OSError leaves here as itself.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from zerodrift.errors import CheckpointError, ZerodriftError, said
from zerodrift.files import kind_of

Kind = Literal["file", "folder", "nothing"]
SHOWN = 200
"""Letters of a path or name that an error shows."""


def short(text: object) -> str:
    """A path or name as an error shows it: cut where it is endless."""
    plain = str(text)
    return plain if len(plain) <= SHOWN else f"{plain[: SHOWN // 2]}...{plain[-SHOWN // 4 :]}"


def kind_at(path: Path) -> Kind:
    """What is there, links followed."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise CheckpointError(short(path), "must be a file or folder", got="a link to nothing") from None
        return "nothing"
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    kind = kind_of(mode)
    if kind not in ("", "a folder"):
        raise CheckpointError(short(path), "must be a file or folder", got=kind)
    return "folder" if kind else "file"


def is_folder(path: Path, must: str) -> bool:
    """Whether a folder is there; `must` says what a file of the name should be."""
    kind = kind_at(path)
    if kind == "file":
        raise CheckpointError(short(path), must, got="a file")
    return kind == "folder"


def exists(path: Path) -> bool:
    """Whether anything has the name, a link to nothing too."""
    return os.path.lexists(path)


def listed(folder: Path) -> list[Path]:
    """What is in a folder, by name."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error


def own_file(folder: Path, name: str) -> Path:
    """A file of a checkpoint by the name that the checkpoint has for it: a regular file of the folder itself.
    FileNotFoundError where there is none."""
    path = folder / name
    if not name or name in (".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise CheckpointError(short(folder), "must name files that are in it", got=short(repr(name)))
    kind = kind_of(path.lstat().st_mode)
    if kind:
        raise CheckpointError(
            short(path),
            "must be a file of the checkpoint itself",
            got=kind,
            do="Copy the checkpoint as files.",
        )
    return path


def open_own(folder: Path, name: str) -> IO[bytes]:
    """The same, open for reading."""
    try:
        return own_file(folder, name).open("rb")
    except OSError as error:
        raise unreadable(folder / short(name), error) from error


def read_file(path: Path) -> bytes:
    """A regular file in full, links followed."""
    kind = kind_at(path)
    if kind != "file":
        got = "a folder" if kind == "folder" else "no such file"
        raise CheckpointError(short(path), "must be a file", got=got)
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else said(error)
    return CheckpointError(short(path), "must be readable", got=reason)


# --- writing ----------------------------------------------------------------------------------------------

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path, todo: str = "Choose another folder.") -> Iterator[None]:
    """What the operating system says no to, in a sentence."""
    try:
        yield
    except ZerodriftError:
        raise
    except Exception as error:
        refused = refusal(error)
        if refused is None:
            raise
        raise unwritable(path, refused, todo) from error


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """The same of a full disk alone, around work that also reads."""
    try:
        yield
    except ZerodriftError:
        raise
    except Exception as error:
        refused = refusal(error)
        if refused is None or refused.errno not in FULL:
            raise
        raise unwritable(path, refused) from error


def refusal(error: BaseException | None) -> OSError | None:
    """What the operating system refused, where that is what an error comes from: writers that are not
    Python's say only that a write failed."""
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


def unwritable(path: Path, error: OSError, todo: str = "Choose another folder.") -> CheckpointError:
    """A refusal in a sentence, with the room that is left where that is why."""
    where = error.filename if isinstance(error.filename, str) else str(path)
    if error.errno in FULL:
        todo = f"{free(path)}Make room, or choose another disk."
    reason = error.strerror or said(error)
    return CheckpointError(short(where), "must be written", got=reason, do=todo)


def free(path: Path) -> str:
    """How much room there is where a path is, or was to be."""
    for place in (path, *path.parents):
        try:
            free = shutil.disk_usage(place).free
        except OSError:
            continue
        return f"{free / 1e9:.3f} GB are free in {short(place)}. "
    return ""
