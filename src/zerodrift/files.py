"""Opens files that somebody named, if that is what they are, and locks those that processes share.

A pipe would be waited for without end, a device may never end, and opening a socket says nothing that
helps. So what a path leads to is looked at first.

Invariant: what is opened is a regular file; anything else is an OSError whose `strerror` says what it is. A
lock goes with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # not every system has file locks
    fcntl = None  # type: ignore[assignment]

_KINDS = {
    stat.S_IFREG: "",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def kind_of(mode: int) -> str:
    """What a mode says that a path is; `""` for a regular file."""
    return _KINDS.get(stat.S_IFMT(mode), "no file")


def kind(path: str | os.PathLike[str]) -> str:
    """What a path leads to where that is no regular file, `a pipe` say; `""` for one, and for nothing."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    return kind_of(mode)


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, to read bytes from."""
    kind_found = kind(path)
    if kind_found == "a folder":
        raise IsADirectoryError(errno.EISDIR, kind_found, os.fsdecode(path))
    if kind_found:
        raise OSError(errno.EINVAL, f"{kind_found}, which is no file", os.fsdecode(path))
    return open(path, "rb")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """One process at a time, which is told that it is alone; without locks there may be several."""
    with path.open("w") as file:
        alone = False
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
                alone = True
        yield alone


def is_locked(path: Path) -> bool:
    """Whether a process has it, as far as can be told: where there are no locks, it is believed to."""
    if fcntl is None:
        return True
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
