"""Regular files, file locks and the folder of the user's cache.

Invariant: only regular files are opened, since reading a pipe or a device may never end. Anything else raises
an OSError whose `strerror` names its kind. A lock ends with its process.
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
    """Name the kind of a file mode, or `""` for a regular file."""
    return _KINDS.get(stat.S_IFMT(mode), "no file")


def kind(path: str | os.PathLike[str]) -> str:
    """Name the kind of a path, such as `a pipe`, or `""` for a regular or missing file."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return ""
    return kind_of(mode)


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read bytes."""
    kind_found = kind(path)
    if kind_found == "a folder":
        raise IsADirectoryError(errno.EISDIR, kind_found, os.fsdecode(path))
    if kind_found:
        raise OSError(errno.EINVAL, f"{kind_found}, which is no file", os.fsdecode(path))
    return open(path, "rb")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock a file. Yield True if this process holds it alone, and False on a system without locks."""
    with path.open("w") as file:
        alone = False
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
                alone = True
        yield alone


def is_locked(path: Path) -> bool:
    """Return True if a process holds the lock, or if the system has no locks."""
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


def cache_folder() -> Path | None:
    """Return the user's cache folder for zerodrift, made if need be; None where it cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    with contextlib.suppress(OSError, RuntimeError):
        folder = (Path(base) if base else Path.home() / ".cache") / "zerodrift"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return None
