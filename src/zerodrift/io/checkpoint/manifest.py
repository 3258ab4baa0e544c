"""What a checkpoint says of itself: the manifest, its table of parameters, and the checksums of its files.

No torch here: `inspect` reads this much on any machine. The manifest is the last file of a save, so a
folder without one is a save that was cut short. It has as many bytes on any number of ranks: what each rank
wrote is in `descriptions.py`. In format 1, which is still read, it names the files of all ranks.

Invariant: a manifest that `read_manifest` returns is the one that was written, bit for bit, and `damage` is
empty only where every file it is given is too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerodrift.dtypes import DType
from zerodrift.errors import CheckpointError, Problem, Problems, said
from zerodrift.io.paths import open_own, own_file, short
from zerodrift.mesh import MeshShape
from zerodrift.record import decode, encode

MANIFEST = "checkpoint.json"
PARAMETERS = "parameters.json"
PLAN = "plan.json"
SHARED = "shared.pt"
_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint, the manifest apart."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """One parameter in a checkpoint."""

    names: tuple[str, ...]
    """Every name it has; more than one when tied."""
    shape: tuple[int, ...]
    dtype: str
    """Of the saved weight."""
    group: int
    """The parameter group of the optimizer that it was in; -1 for none."""
    moments: tuple[str, ...]
    """torch's names of the optimizer's moments that were saved with it."""

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of all ranks, which are described beside them."""

    save: str
    """Which save wrote them; in each description, so that none of another is taken for one of these."""
    ranks: int
    """How many have a description."""
    bytes: int
    """Of the files and their descriptions."""
    seal: str
    """The sum of the descriptions' checksums: no file of a rank is another, whoever looks at which."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The head of a checkpoint."""

    run: str
    """Drawn when a run saves first, kept when it is resumed: two runs cannot mix their checkpoints."""
    tag: str
    step: int
    skipped: int
    """Steps that were skipped."""
    saved: str
    """When: ISO 8601, UTC."""
    versions: tuple[tuple[str, str], ...]
    """(package, version) of what wrote it."""
    source: str
    """The model's name."""
    mode: str
    stage: int
    mesh: MeshShape
    digest: str
    """Of the plan; empty where there was none."""
    optimizer: str
    """What the moments mean: `AdamW`; empty without one."""
    schedule: str
    loss_scale: float
    """1 without one."""
    lr: tuple[float, ...]
    """Of each parameter group."""
    ranks: int
    """Ranks that left a state of their own: random numbers, the client's."""
    parameters: int
    elements: int
    """Of the model."""
    files: tuple[File, ...]
    """But those of ranks; in format 1 those too."""
    digests: tuple[tuple[str, str], ...] = field(default=(), metadata={"omitted": True})
    """Of the values that were saved; see `digests.py`. Empty where nobody took them."""
    of_ranks: RankFiles | None = field(default=None, metadata={"omitted": True})
    """None in format 1."""

    @property
    def format(self) -> int:
        return 1 if self.of_ranks is None else 2

    @property
    def file_count(self) -> int:
        """The manifest not counted."""
        return len(self.files) + (3 * self.of_ranks.ranks if self.of_ranks else 0)

    @property
    def bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.bytes for file in self.files) + (self.of_ranks.bytes if self.of_ranks else 0)


# --- writing ------------------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a checkpoint, with a checksum of its own."""
    write_whole(folder / MANIFEST, _sealed(manifest.format, json.dumps(encode(manifest), indent=1)))


def _sealed(version: int, head: str) -> str:
    return f'{{"format": {version}, {sealed("checkpoint", head)}}}\n'


def sealed(name: str, head: str) -> str:
    """Members of a JSON object: a value, and before it the checksum of its text."""
    return f'"sha256": "{hashlib.sha256(head.encode()).hexdigest()}",\n"{name}": {head}'


def write_entries(folder: Path, entries: Iterable[SavedParameter]) -> File:
    """The table of parameters, one per line."""
    rows = ",\n".join(
        json.dumps([e.names, e.shape, e.dtype, e.group, e.moments], separators=(",", ":")) for e in entries
    )
    return write_whole(folder / PARAMETERS, f"[\n{rows}\n]\n")


def write_plan(folder: Path, plan: dict[str, Any]) -> File:
    return write_whole(folder / PLAN, json.dumps(plan, separators=(",", ":")))


def write_whole(path: Path, text: str | bytes) -> File:
    """A small file that is on the disk when this returns."""
    data = text.encode() if isinstance(text, str) else text
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return File(path.name, len(data), hashlib.sha256(data).hexdigest())


def measured(path: Path) -> File:
    """A file as it is."""
    return File(path.name, path.stat().st_size, _sha256(path))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


# --- reading ------------------------------------------------------------------------------------------

REMEDY = "Load an older checkpoint, or restore the file from a copy."


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder, its own checksum verified."""
    path = folder / MANIFEST
    try:
        text = own_file(folder, MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            short(folder),
            f"must hold a `{MANIFEST}`, which is the last file of a save",
            got="none",
            do="The save was cut short, or this is no checkpoint: load another.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, f"what cannot be read ({error})") from None
    try:
        document = json.loads(text)
        version, head = document["format"], document["checkpoint"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"no manifest ({type(error).__name__})") from None
    if version not in (1, 2):
        raise CheckpointError(
            path,
            "must be of format 1 or 2",
            got=repr(version),
            do="Read it with the zerodrift that wrote it.",
        )
    # Over the whole text: the checksum of what it parses to would miss a flip in what nobody reads.
    if text != _sealed(version, json.dumps(head, indent=1)):
        raise _damaged(path, "another text than its checksum is of")
    try:
        manifest = decode(Manifest, head)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"other fields ({error})") from None
    if manifest.format != version:
        raise _damaged(path, "another format than its fields are of")
    return manifest


def read_entries(folder: Path) -> tuple[SavedParameter, ...]:
    """The table of parameters; verify the folder first."""
    with open_own(folder, PARAMETERS) as stream:
        data = stream.read()
    try:
        return tuple(_entry(*row) for row in json.loads(data.decode()))
    except (ValueError, TypeError, RecursionError) as error:
        must = "must be a table of parameters"
        raise CheckpointError(str(folder / PARAMETERS), must, got=short(said(error)), do=REMEDY) from error


def _entry(names: list[str], shape: list[int], dtype: str, group: int, moments: list[str]) -> SavedParameter:
    texts, numbers = [dtype, *names, *moments], [group + 1, *shape]
    if not names or not all(isinstance(text, str) for text in texts):
        raise ValueError("a row without names")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a row with a shape that is none")
    return SavedParameter(tuple(names), tuple(shape), DType(dtype).value, group, tuple(moments))


def read_plan(folder: Path) -> dict[str, Any] | None:
    """The plan's JSON, where one was saved."""
    if not os.path.lexists(folder / PLAN):
        return None
    with open_own(folder, PLAN) as stream:
        return json.loads(stream.read().decode())


def damage(folder: Path, files: Sequence[File], *, content: bool = True) -> list[Problem]:
    """What of `files` is not as it was written: missing, of another size, or with other bits."""
    problems = []
    for file in files:
        path = folder / file.name
        try:
            size = own_file(folder, file.name).stat().st_size
            if size != file.bytes:
                must = f"must have the {file.bytes:,} bytes that were written"
                problems.append(Problem(str(path), must, got=f"{size:,}", do=REMEDY))
            elif content and _sha256(path) != file.sha256:
                problems.append(
                    Problem(str(path), "must be the bits that were written", got="others", do=REMEDY)
                )
        except FileNotFoundError:
            problems.append(Problem(str(path), "must be there", got="no such file", do=REMEDY))
        except (OSError, CheckpointError) as error:
            got = str(error) if isinstance(error, CheckpointError) else error.strerror or str(error)
            problems.append(Problem(str(path), "must be readable", got=got, do=REMEDY))
    return problems


def raise_damage(damaged: Iterable[Problem]) -> None:
    problems = Problems()
    problems.include(*damaged)
    problems.raise_as(CheckpointError)


def _damaged(path: Path, got: str) -> CheckpointError:
    return CheckpointError(str(path), "must be the manifest that was written", got=got, do=REMEDY)
