"""A folder that is there when it is whole: written beside its place under a hidden name, then renamed.

    models/a                       the folder
    models/.a.writing-4f1c09ab     one that is being written, or was cut short
    models/.a.old-4f1c09ab         one that is being replaced

What a killed writer leaves behind is removed by the next one that writes to the same place; a writer that
is alive is left alone, and named.

Invariant: under its own name a folder was never anything but whole.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerodrift.errors import CheckpointError
from zerodrift.io.checkpoint_folder import sync_folder
from zerodrift.io.checkpoint_lock import NAME, Lock


class Staging:
    """One folder on its way. Made, published and removed by one process; others may write into `path`."""

    def __init__(self, target: Path, overwrite: bool = False) -> None:
        self.target = target
        self._key = uuid.uuid4().hex[:8]
        self.path = target.parent / f".{target.name}.writing-{self._key}"
        with said(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._clean()
            check_target(target, overwrite)
            self.path.mkdir()
            self._lock = Lock.take(self.path)

    def _clean(self) -> None:
        """Remove what dead writers left."""
        for left in self.target.parent.glob(f".{self.target.name}.writing-*"):
            Lock.take(left)  # raises where somebody is alive
            shutil.rmtree(left, ignore_errors=True)
        for left in self.target.parent.glob(f".{self.target.name}.old-*"):
            if self.target.exists():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.rename(self.target)  # its successor never came

    def publish(self) -> None:
        """Give it its name."""
        aside = self.target.parent / f".{self.target.name}.old-{self._key}"
        with said(self.target):
            self._lock.release()
            (self.path / NAME).unlink(missing_ok=True)
            sync_folder(self.path)
            if self.target.exists():
                self.target.rename(aside)
            self.path.rename(self.target)
            sync_folder(self.target.parent)
            shutil.rmtree(aside, ignore_errors=True)

    def remove(self) -> None:
        """Nothing was written."""
        shutil.rmtree(self.path, ignore_errors=True)


def check_target(target: Path, overwrite: bool) -> None:
    """That nothing is in the way."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"`{target}`: must be a folder, or not be there; got a file.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise CheckpointError(
            f"`{target}`: must not be there, or be empty; got a folder with something in it. Choose "
            f"another, or say `overwrite`."
        )


@contextmanager
def said(path: Path) -> Iterator[None]:
    """What the operating system says no to, in a sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        todo = "Choose another folder."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path if path.exists() else path.parent).free
            todo = f"{free / 1e9:.1f} GB are free. Make room, or choose another disk."
        where = os.fspath(error.filename) if isinstance(error.filename, str) else str(path)
        raise CheckpointError(f"`{where}`: must be written; got {reason!r}. {todo}") from error
