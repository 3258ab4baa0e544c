"""A folder of checkpoints: publish new ones, find them by tag, and remove old ones.

    runs/a/latest                      the tag of the newest
    runs/a/step-00000200/              a complete checkpoint
    runs/a/.writing-step-00000300@x/   a save that is under way, or was cut short
    runs/a/.old-step-00000200@x/       a checkpoint that is being replaced or removed
    runs/a/.lock                       the lock of a save under way

The folder may also hold files of others: only checkpoints are renamed or removed, and never through a link.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path

from zerodrift.checkpoint.files import (
    Lock,
    NewFolder,
    is_folder,
    kind_at,
    list_folder,
    short,
    sync_folder,
    unreadable,
)
from zerodrift.checkpoint.manifest import MANIFEST, PARAMETERS, SHARED, Manifest, read_manifest, write_whole
from zerodrift.errors import CheckpointError, did_you_mean, nearest_path

LATEST = "latest"
LONGEST = 200
"""Most letters of a tag: a file name has at most 255, and a save writes under a longer name."""
_WRITING, _OLD = ".writing-", ".old-"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_AUTOMATIC = re.compile(r"step-\d{8,}")
_HIDDEN = re.compile(rf"({re.escape(_WRITING)}|{re.escape(_OLD)})({_TAG.pattern})@[0-9a-f]{{8}}")
_PARTS = re.compile(
    rf"\.metadata|{re.escape(PARAMETERS)}|{re.escape(SHARED)}|rank-\d+\.(pt|json)|__\d+_\d+\.distcp"
)
"""Files of a checkpoint other than the manifest."""
DEEPSPEED = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
"""Files that mark a checkpoint of DeepSpeed."""


def automatic(step: int) -> str:
    return f"step-{step:08d}"


def save_of(path: Path) -> str:
    """Return the unique name of the save that writes into a folder made by `begin`."""
    return path.name.removeprefix(_WRITING)


def check_tag(tag: str) -> None:
    if not isinstance(tag, str) or tag == LATEST or len(tag) > LONGEST or not _TAG.fullmatch(tag):
        must = f"must be letters, digits, `_`, `.`, `+` and `-`, at most {LONGEST}, and not {LATEST!r}"
        raise CheckpointError("tag", must, got=short(repr(tag)))


def read_latest(folder: Path) -> str:
    """Return the tag that the file `latest` names; `""` if there is no such file."""
    path = folder / LATEST
    kind = kind_at(path)
    if kind != "file":
        if kind == "folder":
            raise CheckpointError(short(path), "must be a file", got="a folder")
        return ""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise _no_tag(path, f"bytes that are not UTF-8 ({error.reason})") from None
    line, _, seal = text.partition("\n")
    tag, seal = line.strip(), seal.removesuffix("\n")
    if not tag:
        raise _no_tag(path, "an empty file" if not text.strip() else "an empty line")
    if tag in (".", "..") or "/" in tag or not tag.isprintable() or len(tag.encode()) > 255:
        raise _no_tag(path, short(repr(tag)))
    if (seal.strip("\r\n") and seal != _seal(tag)) or len(line) - len(line.rstrip()) >= 32:
        raise _no_tag(path, f"{short(repr(tag))} with the checksum of another")
    return tag


def latest_text(tag: str) -> str:
    return f"{tag}\n{_seal(tag)}\n"


def _seal(tag: str) -> str:
    """Return a checksum in blanks and tabs, which scripts written for DeepSpeed strip from the tag."""
    return format(zlib.crc32(tag.encode()), "032b").translate({ord("0"): " ", ord("1"): "\t"})


def _no_tag(path: Path, got: str) -> CheckpointError:
    do = "It is damaged: load a checkpoint by its tag, or write the tag of the newest into the file."
    return CheckpointError(short(path), "must hold the tag of a checkpoint", got=got, do=do)


def is_deepspeed(path: Path) -> bool:
    """Return whether a folder looks like a checkpoint of DeepSpeed, or a folder of them."""
    if kind_at(path) != "folder":
        return False
    tag = read_latest(path)
    folder = path / tag if tag else path
    return kind_at(folder) == "folder" and has_deepspeed_files(folder)


def has_deepspeed_files(folder: Path) -> bool:
    return any(DEEPSPEED.fullmatch(entry.name) for entry in list_folder(folder))


class CheckpointFolder:
    """The checkpoints below one path. Every change is made under the folder's lock."""

    def __init__(self, path: str | os.PathLike[str], *, shared: bool = False) -> None:
        """Open a folder; if it is `shared`, a save may replace a checkpoint of DeepSpeed."""
        self.path, self._shared = Path(path), shared

    def tags(self) -> list[str]:
        """List the checkpoints by their step, damaged ones first."""
        return [tag for _, tag, _ in self._heads()]

    def runs(self) -> dict[str, str]:
        return {tag: run for _, tag, run in self._heads()}

    def _heads(self) -> list[tuple[int, str, str]]:
        """List step, tag and run of the checkpoints, in order; -1 and `""` if a manifest is damaged."""
        found = [(path.name, _manifest(path)) for path in self._children() if _has_manifest(path)]
        return sorted((-1, tag, "") if head is None else (head.step, tag, head.run) for tag, head in found)

    def unfinished(self) -> list[Path]:
        """List saves that are under way or were cut short."""
        return [path for path in self._children(_WRITING) if path.is_dir()]

    def halves(self) -> list[str]:
        """List tags with files of a checkpoint but no manifest, as an interrupted copy leaves them."""
        folders = [path for path in self._children() if path.is_dir() and not _has_manifest(path)]
        return [
            path.name for path in folders if any(_PARTS.fullmatch(part.name) for part in list_folder(path))
        ]

    def latest(self) -> str:
        """Return the tag that `latest` names, `""` before the first save."""
        return read_latest(self.path)

    def newest(self) -> Path | None:
        """Return the checkpoint to resume from; None if nothing was ever saved, an error if it is damaged."""
        tag = self.latest()
        if tag:
            return self._find(tag)
        halves, tags = self.halves(), self.tags()
        if halves:
            got = f"files of {short(', '.join(halves))} without `{MANIFEST}`, and no `{LATEST}`"
            do = "It was copied in part: copy it again, load another by its tag, or remove it to start over."
            raise CheckpointError(short(self.path), "must hold whole checkpoints, or none", got=got, do=do)
        if tags:  # the first save was cut short before it wrote `latest`
            return self._find(tags[-1])
        # The save that was to replace the only checkpoint may have been cut short.
        old = [path for path in self._children(_OLD) if _HIDDEN.fullmatch(path.name)]
        return next((path for path in old if _has_manifest(path)), None)

    def find(self, tag: str) -> Path:
        """Return the folder of a tag, or of the newest checkpoint for `latest`."""
        checkpoint = self.newest() if tag == LATEST else self._find(tag)
        if checkpoint is not None:
            return checkpoint
        where = short(self.path)
        if not self._is_there():
            near = nearest_path(self.path)
            raise CheckpointError(where, "must be a folder of checkpoints", got="no such folder", do=near)
        cut = len(self.unfinished())
        also = f" but {cut} that {'was' if cut == 1 else 'were'} cut short" if cut else ""
        raise CheckpointError(where, "must hold a checkpoint", got=f"none{also}")

    def _find(self, tag: str) -> Path:
        if _TAG.fullmatch(tag) and len(tag) <= LONGEST:
            for path in (self.path / tag, *self._children(f"{_OLD}{tag}@")):
                if _has_manifest(path):
                    return path
        tags = self.tags()
        got = short(", ".join(tags) or "none")
        if tag in self.halves():
            got += f" and files of it without `{MANIFEST}`: it was copied in part"
        must = f"must hold a checkpoint with the tag {short(repr(tag))}"
        raise CheckpointError(short(self.path), must, got=got, do=did_you_mean(tag[:LONGEST], tags))

    def clean(self) -> list[str]:
        """Remove what dead saves left, and restore a checkpoint that one of them was to replace. Return the
        names that were removed."""
        gone = []
        for path in self._children("."):
            match = _HIDDEN.fullmatch(path.name)
            if path.name == f"{_WRITING}{LATEST}" and path.is_file():
                path.unlink()
            elif match is None or not _is_own_folder(path):
                continue
            elif match[1] == _OLD and not os.path.lexists(self.path / match[2]) and _has_manifest(path):
                path.rename(self.path / match[2])
                continue
            else:
                shutil.rmtree(path, ignore_errors=True)
            gone.append(path.name)
        return gone

    def begin(self, tag: str, check: Callable[[], None] = lambda: None) -> NewFolder:
        """Take the lock and create a folder to write a checkpoint into. `check` runs under the lock, before
        anything is created, and may raise."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = Lock.take(self.path)
        try:
            self.clean()
            check()
            self.require_free(tag)
            key = uuid.uuid4().hex[:8]
            path = self.path / f"{_WRITING}{tag}@{key}"
            path.mkdir()
        except BaseException:
            lock.release()
            raise
        return NewFolder(path, self.path / tag, self.path / f"{_OLD}{tag}@{key}", lock)

    def require_free(self, tag: str) -> None:
        """Raise if a checkpoint with this tag would replace anything but a checkpoint."""
        home = self.path / tag
        if not os.path.lexists(home):
            return
        got = "a link" if home.is_symlink() else "" if home.is_dir() else "a file"
        is_known = not got and (_is_checkpoint(home) or (self._shared and is_deepspeed(home)))
        if not got and not is_known and any(home.iterdir()):
            got = "a folder that holds something else"
        if got:
            must = "must be a checkpoint, or not exist"
            raise CheckpointError(short(home), must, got=got, do="Choose another tag, or move it away.")

    def publish(self, new: NewFolder, latest: bool = True) -> Path:
        """Rename a new folder to its tag and, with `latest`, make it the newest."""
        self.require_free(new.home.name)
        path, draft = self.path / LATEST, self.path / f"{_WRITING}{LATEST}"
        if latest and kind_at(path) == "folder":
            must = "must be a file, or not exist"
            raise CheckpointError(short(path), must, got="a folder", do="Move it away.")
        try:
            if latest:
                write_whole(draft, latest_text(new.home.name))  # first, as it needs room on the disk
            new.publish()
            if latest:
                draft.replace(path)
                sync_folder(self.path)
        finally:
            draft.unlink(missing_ok=True)
        return new.home

    def prune(self, keep: int) -> list[str]:
        """Remove all but the newest `keep` checkpoints with an automatic tag. The checkpoint that `latest`
        names stays, and so does a folder that is not a whole checkpoint."""
        latest = self.latest()
        tags = [tag for tag in self.tags() if _AUTOMATIC.fullmatch(tag) and _is_checkpoint(self.path / tag)]
        gone = [tag for tag in tags[:-keep] if tag != latest]
        for tag in gone:
            # Renamed first: a removal that is cut short must not look like a checkpoint.
            aside = self.path / f"{_OLD}{tag}@{uuid.uuid4().hex[:8]}"
            (self.path / tag).rename(aside)
            (aside / MANIFEST).unlink()
            shutil.rmtree(aside, ignore_errors=True)
        return gone

    def _is_there(self) -> bool:
        return is_folder(self.path, "must be a folder of checkpoints")

    def _children(self, hidden: str = "") -> list[Path]:
        """List the visible names of the folder, or the hidden ones with a prefix."""
        children = list_folder(self.path) if self._is_there() else []
        return [path for path in children if path.name.startswith(hidden or ".") == bool(hidden)]


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is a folder, no link to one, with a whole manifest."""
    return _is_own_folder(path) and (head := _manifest(path)) is not None and bool(head.run)


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None
