"""A folder of checkpoints: what is in it, how a new one appears in it, and how old ones go.

A save writes into a folder whose name begins with a dot, and is there when that is renamed to its tag: before
the rename nothing has happened, after it everything has.

    runs/a/latest                      the tag of the newest
    runs/a/step-00000200/              a checkpoint
    runs/a/.writing-step-00000300-x/   a save that is under way, or was cut short
    runs/a/.old-step-00000200-x/       replaced, or on its way out
    runs/a/.lock                       somebody saves

Nothing is renamed or removed but what is known to be a checkpoint, or a rest of one, and no link is followed
to it: a folder may hold other people's things, too.

Invariant: a folder with a tag's name holds a checkpoint that was written to its end.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path

from zerodrift.errors import CheckpointError, did_you_mean
from zerodrift.io.atomic import NewFolder, sync_folder
from zerodrift.io.checkpoint.manifest import MANIFEST, PARAMETERS, SHARED, read_manifest
from zerodrift.io.lock import Lock
from zerodrift.io.paths import exists, is_folder, kind_at, listed, read_file, short

LATEST = "latest"
LONGEST = 200
"""Letters of a tag: a file system takes 255 of a name, and a save writes under a longer one."""
_WRITING, _OLD = ".writing-", ".old-"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_AUTOMATIC = re.compile(r"step-\d{8,}")
_OURS = re.compile(rf"({re.escape(_WRITING)}|{re.escape(_OLD)})({_TAG.pattern})@[0-9a-f]{{8}}")
"""Hidden names that a save gives."""
_PARTS = re.compile(
    rf"\.metadata|{re.escape(PARAMETERS)}|{re.escape(SHARED)}|rank-\d+\.(pt|json)|__\d+_\d+\.distcp"
)
"""Files of a checkpoint, the manifest apart."""


def automatic(step: int) -> str:
    """The tag of a save that was given none."""
    return f"step-{step:08d}"


def save_of(path: Path) -> str:
    """Which save writes into a folder of `begin`: no other has the name."""
    return path.name.removeprefix(_WRITING)


def check_tag(tag: str) -> None:
    if not isinstance(tag, str) or tag == LATEST or len(tag) > LONGEST or not _TAG.fullmatch(tag):
        raise CheckpointError(
            "tag",
            f"must be letters, digits, `_`, `.`, `+` and `-`, at most {LONGEST}, and not {LATEST!r}",
            got=short(repr(tag)),
        )


# --- latest -----------------------------------------------------------------------------------------------


def read_latest(folder: Path) -> str:
    """The tag that the file `latest` names; `""` where there is no such file."""
    path = folder / LATEST
    if kind_at(path) == "nothing":
        return ""
    try:
        text = read_file(path).decode()
    except UnicodeDecodeError as error:
        raise _no_tag(path, f"what is no UTF-8 ({error.reason})") from None
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
    """What `latest` holds."""
    return f"{tag}\n{_seal(tag)}\n"


def _seal(tag: str) -> str:
    """A checksum in blanks and tabs: a script written for DeepSpeed strips the file and has the tag."""
    return format(zlib.crc32(tag.encode()), "032b").translate({ord("0"): " ", ord("1"): "\t"})


def _no_tag(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        short(path),
        "must hold the tag of a checkpoint",
        got=got,
        do="It is damaged: load a checkpoint by its tag, or write the tag of the newest into the file.",
    )


class CheckpointFolder:
    """The checkpoints below one path. Whoever changes anything holds the folder's lock."""

    def __init__(
        self, path: str | os.PathLike[str], replaceable: Callable[[Path], bool] = lambda path: False
    ) -> None:
        """`replaceable` says of a folder that is no checkpoint of ours whether one may replace it."""
        self.path = Path(path)
        self._replaceable = replaceable

    def tags(self) -> list[str]:
        """The checkpoints, oldest first by the step they were saved at. What is damaged comes first."""
        folders = [path for path in self._children() if _has_manifest(path)]
        return [path.name for path in sorted(folders, key=lambda path: (_step(path), path.name))]

    def runs(self) -> dict[str, str]:
        """Which run left each of them; `""` for one whose manifest is damaged."""
        runs = {}
        for tag in self.tags():
            try:
                runs[tag] = read_manifest(self.path / tag).run
            except CheckpointError:
                runs[tag] = ""
        return runs

    def runs_found(self) -> dict[str, str]:
        """The same of what can be read; a folder that cannot be is told by whoever uses it."""
        try:
            return self.runs()
        except (CheckpointError, OSError):
            return {}

    def unfinished(self) -> list[Path]:
        """Saves that are under way or were cut short."""
        hidden = self._children(hidden=True)
        return [path for path in hidden if path.name.startswith(_WRITING) and path.is_dir()]

    def halves(self) -> list[str]:
        """Tags that have files of a checkpoint and no manifest, as a copy that was cut short has."""
        folders = [path for path in self._children() if path.is_dir() and not _has_manifest(path)]
        return [path.name for path in folders if any(_PARTS.fullmatch(part.name) for part in listed(path))]

    def latest(self) -> str:
        """The tag that `latest` names, `""` where nothing was saved to its end."""
        return read_latest(self.path)

    def newest(self) -> Path | None:
        """What a run goes on from; None where nothing was ever saved, which is not where it was damaged."""
        named = self.latest()
        if named:
            return self._named(named)
        halves, tags = self.halves(), self.tags()
        if halves:
            raise CheckpointError(
                short(self.path),
                "must hold whole checkpoints, or none",
                got=f"files of {short(', '.join(halves))} without `{MANIFEST}`, and no `{LATEST}`",
                do=(
                    "It was copied in part: copy it again, load another by its tag, or remove it to "
                    "begin anew."
                ),
            )
        # Nothing names the first one yet, if its save was cut short between its two last steps.
        return self._named(tags[-1]) if tags else self._set_aside()

    def _set_aside(self) -> Path | None:
        """A checkpoint that was about to be replaced when its save ended, the only one."""
        for path in self._children(hidden=True):
            match = _OURS.fullmatch(path.name)
            if match and match[1] == _OLD and _has_manifest(path):
                return path
        return None

    def find(self, tag: str) -> Path:
        """The folder of a tag, or of the newest for `latest`."""
        checkpoint = self.newest() if tag == LATEST else self._named(tag)
        if checkpoint is None:
            raise self._nothing()
        return checkpoint

    def _named(self, tag: str) -> Path:
        if _TAG.fullmatch(tag) and len(tag) <= LONGEST:
            candidates = [self.path / tag]
            candidates += [p for p in self._children(hidden=True) if p.name.startswith(f"{_OLD}{tag}@")]
            named = next((path for path in candidates if _has_manifest(path)), None)
            if named is not None:
                return named
        tags = self.tags()
        half = (
            ""
            if tag not in self.halves()
            else f" and files of it without `{MANIFEST}`: it was copied in part"
        )
        raise CheckpointError(
            short(self.path),
            f"must hold a checkpoint with the tag {short(repr(tag))}",
            got=f"{short(', '.join(tags) or 'none')}{half}",
            do=did_you_mean(tag[:LONGEST], tags),
        )

    def _nothing(self) -> CheckpointError:
        where = short(self.path)
        if not self._is_there():
            return CheckpointError(where, "must be a folder of checkpoints", got="no such folder")
        cut = len(self.unfinished())
        also = f" but {cut} that {'was' if cut == 1 else 'were'} cut short" if cut else ""
        return CheckpointError(where, "must hold a checkpoint", got=f"none{also}")

    # --- under the lock ---------------------------------------------------------------------------------

    def clean(self) -> list[str]:
        """Take away what dead saves left behind; a replaced checkpoint whose successor never came is put
        back. Returns the names of what went."""
        gone = []
        for path in self._children(hidden=True):
            match = _OURS.fullmatch(path.name)
            if path.name == f"{_WRITING}{LATEST}" and path.is_file():
                path.unlink()
            elif match is None or not _is_own_folder(path):
                continue
            elif match[1] == _OLD and not exists(self.path / match[2]) and _has_manifest(path):
                path.rename(self.path / match[2])
                continue
            else:
                shutil.rmtree(path, ignore_errors=True)
            gone.append(path.name)
        return gone

    def begin(self, tag: str, check: Callable[[], None] = lambda: None) -> NewFolder:
        """A new folder to write a checkpoint into, and the lock. `check` may refuse, under the lock and
        before anything is made."""
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
        """That a checkpoint can have the tag without anything else being lost."""
        home = self.path / tag
        if not exists(home):
            return
        got = "a link" if home.is_symlink() else "" if home.is_dir() else "a file"
        if not got and not _is_checkpoint(home) and not self._replaceable(home) and any(home.iterdir()):
            got = "a folder that holds something else"
        if got:
            raise CheckpointError(
                short(home),
                "must be a checkpoint, to be replaced by one, or not be there",
                got=got,
                do="Choose another tag, or move it away.",
            )

    def publish(self, new: NewFolder, latest: bool = True) -> Path:
        """Make what was written the checkpoint of its tag, and, with `latest`, the newest."""
        self.require_free(new.home.name)
        draft = self.path / f"{_WRITING}{LATEST}"
        try:
            if latest:
                self._write_latest(draft, new.home.name)  # what needs room comes before what others can see
            new.publish()
            if latest:
                draft.replace(self.path / LATEST)
                sync_folder(self.path)
        finally:
            draft.unlink(missing_ok=True)
        return new.home

    def _write_latest(self, draft: Path, tag: str) -> None:
        """The next `latest`, under another name."""
        if kind_at(self.path / LATEST) == "folder":
            raise CheckpointError(
                short(self.path / LATEST),
                "must be a file, or not be there",
                got="a folder",
                do="Move it away.",
            )
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(latest_text(tag))
            stream.flush()
            os.fsync(stream.fileno())

    def prune(self, keep: int) -> list[str]:
        """Remove all but the newest `keep` of those whose tag was not chosen; what `latest` names stays, and
        so does what is no whole checkpoint in a folder of its own."""
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

    def _children(self, hidden: bool = False) -> list[Path]:
        children = listed(self.path) if self._is_there() else []
        return [path for path in children if path.name.startswith(".") == hidden]


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _is_checkpoint(path: Path) -> bool:
    """Whether it is a folder, and no link to one, that holds a whole manifest."""
    try:
        return _is_own_folder(path) and bool(read_manifest(path).run)
    except CheckpointError:
        return False


def _step(path: Path) -> int:
    try:
        return read_manifest(path).step
    except CheckpointError:
        return -1
