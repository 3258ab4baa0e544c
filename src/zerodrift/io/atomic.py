"""Folders and files that are there when they are whole: written under another name, then renamed.

    models/a                       a folder
    models/.a.writing-4f1c09ab     one that is being written, or was cut short
    models/.a.old-4f1c09ab         one that is being replaced

What a killed writer leaves behind is removed by the next one that writes to the same place; a writer that
is alive is left alone, and named. A folder of checkpoints has names of its own for the same three, and its
lock beside them (`checkpoint/folder.py`).

Invariant: under its own name nothing was ever anything but whole.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zerodrift.errors import CheckpointError
from zerodrift.io import lock
from zerodrift.io.lock import Lock
from zerodrift.io.paths import exists, is_folder, listed, short, writing

if TYPE_CHECKING:
    from typing_extensions import Self

_KEY = "[0-9a-f]" * 8
MODEL = (".safetensors", ".safetensors.index.json", ".bin")
"""Files that make a folder a model's."""


class NewFolder:
    """A folder on its way to its name, and the lock that says who writes it. One process makes, publishes
    and removes it; others may write into `path`."""

    def __init__(self, path: Path, home: Path, aside: Path, held: Lock) -> None:
        self.path, self.home = path, home
        self.lock = held
        self._aside = aside
        """Where what has the name goes."""
        self._published = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def publish(self) -> None:
        """Give it its name. What had it goes with `remove`; it is back where this fails."""
        (self.path / lock.NAME).unlink(missing_ok=True)
        sync_folder(self.path)
        if exists(self.home):
            self.home.rename(self._aside)
        try:
            self.path.rename(self.home)
        except BaseException:
            if exists(self._aside):
                self._aside.rename(self.home)
            raise
        sync_folder(self.home.parent)
        self._published = True

    def remove(self) -> None:
        """What has no name any more, and the lock. Safe to call twice."""
        shutil.rmtree(self._aside if self._published else self.path, ignore_errors=True)
        self.lock.release()


def new_folder(target: Path, overwrite: bool = False) -> NewFolder:
    """One that may replace, where that is said, what was exported before."""
    _check_target(target, overwrite)
    # Where a link leads, so that the link itself is never renamed away.
    home = target.resolve() if target.is_symlink() else target
    key = uuid.uuid4().hex[:8]
    path = home.with_name(f".{home.name}.writing-{key}")
    with writing(home):
        home.parent.mkdir(parents=True, exist_ok=True)
        _clean(home)
        _check_target(home, overwrite)  # again: what a dead writer had replaced is back
        path.mkdir()
        try:
            return NewFolder(path, home, home.with_name(f".{home.name}.old-{key}"), Lock.take(path))
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise


def _clean(home: Path) -> None:
    """Remove what dead writers left."""
    own = glob.escape(f".{home.name}.")
    for left in home.parent.glob(f"{own}writing-{_KEY}"):
        Lock.take(left)  # raises where somebody is alive
        shutil.rmtree(left, ignore_errors=True)
    for left in home.parent.glob(f"{own}old-{_KEY}"):
        if home.exists():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.rename(home)  # its successor never came


def _check_target(target: Path, overwrite: bool) -> None:
    """That nothing is in the way but, where that is said, what was exported before."""
    there = listed(target) if is_folder(target, "must be a folder, or not be there") else []
    if there and not overwrite:
        raise CheckpointError(
            short(target),
            "must not be there, or be empty",
            got="a folder with something in it",
            do="Choose another, or say `overwrite`.",
        )
    if there and not any(path.name.endswith(MODEL) for path in there):
        raise CheckpointError(
            short(target),
            "must be a model's folder, with `*.safetensors`, to be overwritten as a whole",
            got=short(", ".join(path.name for path in there)),
            do="Choose another folder.",
        )


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Where to write a file; it has its name when the block ends, and nothing is left where that fails."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with writing(path):
            yield partial
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """What was created in or renamed into a folder is on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
