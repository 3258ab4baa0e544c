"""Write folders and files under another name, and rename them once they are whole.

models/a                       a folder
models/.a.writing-4f1c09ab     being written, or cut short: removed by the next writer to the same place
models/.a.old-4f1c09ab         being replaced
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

from zerodrift.checkpoint import lock
from zerodrift.checkpoint.lock import Lock
from zerodrift.checkpoint.paths import is_folder, listed, short, writing
from zerodrift.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Self

MODEL = (".safetensors", ".safetensors.index.json", ".bin")
"""Suffixes of files that make a folder a model's."""


class NewFolder:
    """A folder under construction, and the lock of its writer. One process creates, publishes and removes it;
    others may write into `path`."""

    def __init__(self, path: Path, home: Path, aside: Path, held: Lock) -> None:
        self.path, self.home, self.lock = path, home, held
        self._aside = aside
        self._published = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def publish(self) -> None:
        """Rename the folder to its name; the folder that had the name is restored if this fails."""
        (self.path / lock.NAME).unlink(missing_ok=True)
        sync_folder(self.path)
        if os.path.lexists(self.home):
            self.home.rename(self._aside)
        try:
            self.path.rename(self.home)
        except BaseException:
            if os.path.lexists(self._aside):
                self._aside.rename(self.home)
            raise
        sync_folder(self.home.parent)
        self._published = True

    def remove(self) -> None:
        """Remove what was replaced, or what was not published, and release the lock. Safe to call twice."""
        shutil.rmtree(self._aside if self._published else self.path, ignore_errors=True)
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
        _check_target(home, overwrite)  # again: a replaced folder may have been restored
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
    there = listed(target) if is_folder(target, "must be a folder, or not be there") else []
    if there and not overwrite:
        must, got = "must not be there, or be empty", "a folder with something in it"
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
    """Flush a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
