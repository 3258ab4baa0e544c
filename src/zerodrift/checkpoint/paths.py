"""Open only regular files, as a pipe would wait for ever, and turn the system's refusals into sentences."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Literal

from zerodrift.errors import CheckpointError, ZerodriftError, said
from zerodrift.files import kind_of

Kind = Literal["file", "folder", "nothing"]
SHOWN = 200
"""Letters of a path or name that an error shows."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk."""


def short(text: object) -> str:
    """Return a path or name as an error shows it, cut if it is very long."""
    plain = str(text)
    return plain if len(plain) <= SHOWN else f"{plain[: SHOWN // 2]}...{plain[-SHOWN // 4 :]}"


def kind_at(path: Path) -> Kind:
    """Return what is at a path, links followed."""
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
    """Return whether a folder is there; `must` is the clause that refuses a file."""
    kind = kind_at(path)
    if kind == "file":
        raise CheckpointError(short(path), must, got="a file")
    return kind == "folder"


def listed(folder: Path) -> list[Path]:
    """List a folder by name."""
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
    """Open a checkpoint's file for reading."""
    try:
        return own_file(folder, name).open("rb")
    except OSError as error:
        raise unreadable(folder / short(name), error) from error


def read_file(path: Path) -> bytes:
    """Read a whole regular file, links followed."""
    kind = kind_at(path)
    if kind != "file":
        got = "a folder" if kind == "folder" else "no such file"
        raise CheckpointError(short(path), "must be a file", got=got)
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a path that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else said(error)
    return CheckpointError(short(path), "must be readable", got=reason)


@contextmanager
def writing(path: Path, only: Collection[int] = ()) -> Iterator[None]:
    """Turn a refusal of the system to write `path` into a CheckpointError; with `only`, of these numbers."""
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
    """Return the OSError behind an exception; writers in Rust or C only say so in their text."""
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
    """Say how much space is free at a path, or at its nearest parent that exists."""
    for place in (path, *path.parents):
        try:
            return f"{shutil.disk_usage(place).free / 1e9:.3f} GB are free in {short(place)}. "
        except OSError:
            continue
    return ""
