"""A folder of checkpoints: what is in it, how a new one appears in it, and how old ones go.

A save writes into a folder whose name begins with a dot, and is there when that is renamed to its tag: before
the rename nothing has happened, after it everything has.

    runs/a/latest                      the tag of the newest
    runs/a/step-00000200/              a checkpoint
    runs/a/.writing-step-00000300-x/   a save that is under way, or was cut short
    runs/a/.old-step-00000200-x/       replaced, or on its way out
    runs/a/.lock                       somebody saves

Invariant: a folder with a tag's name holds a checkpoint that was written to its end.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from zerodrift.errors import CheckpointError, did_you_mean
from zerodrift.io.checkpoint_manifest import MANIFEST, read_manifest

LATEST = "latest"
_WRITING, _OLD = ".writing-", ".old-"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_AUTOMATIC = re.compile(r"step-\d{8,}")


def automatic(step: int) -> str:
    """The tag of a save that was given none."""
    return f"step-{step:08d}"


def check_tag(tag: str) -> None:
    if tag == LATEST or not _TAG.fullmatch(tag):
        raise CheckpointError(
            f"`tag`: must be letters, digits, `_`, `.`, `+` and `-`, and not {LATEST!r}; got {tag!r}."
        )


class Folder:
    """The checkpoints below one path. Whoever changes anything holds the folder's lock."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def tags(self) -> list[str]:
        """The checkpoints, oldest first by the step they were saved at. What is damaged comes first."""
        found = [path for path in self._children() if (path / MANIFEST).is_file()]
        return [path.name for path in sorted(found, key=lambda path: (_step(path), path.name))]

    def runs(self) -> dict[str, str]:
        """Which run left each of them; `""` for one whose manifest is damaged."""
        found = {}
        for tag in self.tags():
            try:
                found[tag] = read_manifest(self.path / tag).run
            except CheckpointError:
                found[tag] = ""
        return found

    def unfinished(self) -> list[Path]:
        """Saves that are under way or were cut short."""
        hidden = self._children(hidden=True)
        return [path for path in hidden if path.name.startswith(_WRITING) and path.is_dir()]

    def latest(self) -> str:
        """The tag that `latest` names, `""` where nothing was saved to its end."""
        try:
            return (self.path / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""

    def find(self, tag: str) -> Path:
        """The folder of a tag, or of the newest for `latest`."""
        named, tags = tag, self.tags()
        if tag == LATEST:
            # Nothing names the first one yet, if its save was cut short between its two last steps.
            named = self.latest() or (tags[-1] if tags else "")
        if not named:
            raise CheckpointError(self._nothing())
        if _TAG.fullmatch(named):
            candidates = [self.path / named, *self.path.glob(f"{_OLD}{named}@*")]
            found = next((path for path in candidates if (path / MANIFEST).is_file()), None)
            if found is not None:
                return found
        have = ", ".join(tags) or "none"
        raise CheckpointError(
            f"`{self.path}`: must hold a checkpoint with the tag {named!r}; got {have}. "
            f"{did_you_mean(named, tags)}".rstrip()
        )

    def _nothing(self) -> str:
        if not self.path.is_dir():
            return f"`{self.path}`: must be a folder of checkpoints; got no such folder."
        cut = len(self.unfinished())
        text = f"`{self.path}`: must hold a checkpoint; got none"
        return text + (f" but {cut} that {'was' if cut == 1 else 'were'} cut short." if cut else ".")

    # --- under the lock ---------------------------------------------------------------------------------

    def clean(self) -> list[str]:
        """Take away what dead saves left behind; a replaced checkpoint whose successor never came is put
        back. Returns the names of what went."""
        gone = []
        for path in self._children(hidden=True):
            if path.name.startswith(_OLD):
                home = self.path / path.name.removeprefix(_OLD).rpartition("@")[0]
                if not home.exists() and (path / MANIFEST).is_file():
                    path.rename(home)
                    continue
            elif not path.name.startswith(_WRITING):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
            gone.append(path.name)
        return gone

    def begin(self, tag: str) -> Path:
        """A new folder to write a checkpoint into."""
        path = self.path / f"{_WRITING}{tag}@{uuid.uuid4().hex[:8]}"
        path.mkdir()
        return path

    def publish(self, written: Path, tag: str, latest: bool = True) -> Path:
        """Make what was written the checkpoint of a tag, and, with `latest`, the newest."""
        home, aside = self.path / tag, self._aside(tag)
        sync_folder(written)
        if home.exists():
            home.rename(aside)
        written.rename(home)
        sync_folder(self.path)
        if latest:
            self._name(tag)
        shutil.rmtree(aside, ignore_errors=True)
        return home

    def _name(self, tag: str) -> None:
        """Make it what `latest` names."""
        draft = self.path / f"{_WRITING}{LATEST}"
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(f"{tag}\n")
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self.path / LATEST)
        sync_folder(self.path)

    def prune(self, keep: int) -> list[str]:
        """Remove all but the newest `keep` of those whose tag was not chosen; what `latest` names stays."""
        tags = [tag for tag in self.tags() if _AUTOMATIC.fullmatch(tag)]
        gone = [tag for tag in tags[:-keep] if tag != self.latest()]
        for tag in gone:
            # Renamed first: a removal that is cut short must not look like a checkpoint.
            aside = self._aside(tag)
            (self.path / tag).rename(aside)
            (aside / MANIFEST).unlink()
            shutil.rmtree(aside, ignore_errors=True)
        return gone

    def _aside(self, tag: str) -> Path:
        return self.path / f"{_OLD}{tag}@{uuid.uuid4().hex[:8]}"

    def _children(self, hidden: bool = False) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted(path for path in self.path.iterdir() if path.name.startswith(".") == hidden)


def _step(path: Path) -> int:
    try:
        return read_manifest(path).step
    except CheckpointError:
        return -1


def sync_folder(path: Path) -> None:
    """What was created in or renamed into a folder is on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
