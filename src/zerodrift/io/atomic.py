"""A folder that is there when it is whole: written beside its place under a hidden name, then renamed.

    models/a                       the folder
    models/.a.writing-4f1c09ab     one that is being written, or was cut short
    models/.a.old-4f1c09ab         one that is being replaced

What a killed writer leaves behind is removed by the next one that writes to the same place; a writer that
is alive is left alone, and named.

Invariant: under its own name a folder was never anything but whole.
"""

from __future__ import annotations

import glob
import shutil
import uuid
from pathlib import Path

from zerodrift.errors import CheckpointError
from zerodrift.io.checkpoint.folder import sync_folder
from zerodrift.io.lock import NAME, Lock
from zerodrift.io.paths import is_folder, listed, short, writing

_KEY = "[0-9a-f]" * 8


class Staging:
    """One folder on its way. Made, published and removed by one process; others may write into `path`."""

    def __init__(self, target: Path, overwrite: bool = False) -> None:
        check_target(target, overwrite)
        # Where a link leads, so that the link itself is never renamed away.
        self.target = target = target.resolve() if target.is_symlink() else target
        self._key = uuid.uuid4().hex[:8]
        self.path = target.parent / f".{target.name}.writing-{self._key}"
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._clean()
            check_target(target, overwrite)  # again: what a dead writer had replaced is back
            self.path.mkdir()
            try:
                self._lock = Lock.take(self.path)
            except BaseException:
                self.remove()
                raise

    def _clean(self) -> None:
        """Remove what dead writers left."""
        own = glob.escape(f".{self.target.name}.")
        for left in self.target.parent.glob(f"{own}writing-{_KEY}"):
            Lock.take(left)  # raises where somebody is alive
            shutil.rmtree(left, ignore_errors=True)
        for left in self.target.parent.glob(f"{own}old-{_KEY}"):
            if self.target.exists():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.rename(self.target)  # its successor never came

    def publish(self) -> None:
        """Give it its name."""
        aside = self.target.parent / f".{self.target.name}.old-{self._key}"
        with writing(self.target):
            self._lock.release()
            (self.path / NAME).unlink(missing_ok=True)
            sync_folder(self.path)
            if self.target.exists():
                self.target.rename(aside)
            try:
                self.path.rename(self.target)
            except OSError:
                if aside.exists():
                    aside.rename(self.target)
                raise
            sync_folder(self.target.parent)
            shutil.rmtree(aside, ignore_errors=True)

    def remove(self) -> None:
        """Nothing was written."""
        shutil.rmtree(self.path, ignore_errors=True)


def check_target(target: Path, overwrite: bool) -> None:
    """That nothing is in the way but, where that is said, what was exported before."""
    there = listed(target) if is_folder(target, "must be a folder, or not be there") else []
    if there and not overwrite:
        raise CheckpointError(
            f"`{short(target)}`: must not be there, or be empty; got a folder with something in it. Choose "
            f"another, or say `overwrite`."
        )
    if there and not any(path.name.endswith(MODEL) for path in there):
        raise CheckpointError(
            f"`{short(target)}`: must be a model's folder, with `*.safetensors`, to be overwritten as a "
            f"whole; got {short(', '.join(path.name for path in there))}. Choose another folder."
        )


MODEL = (".safetensors", ".safetensors.index.json", ".bin")
"""Files that make a folder a model's."""
