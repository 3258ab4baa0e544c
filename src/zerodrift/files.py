"""Opens files that somebody named, if that is what they are.

A pipe would be waited for without end, a device may never end, and opening a socket says nothing that
helps. So what a path leads to is looked at first.

Invariant: what is opened is a regular file; anything else is an OSError whose `strerror` says what it is.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

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
