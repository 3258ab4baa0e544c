"""The small files of a checkpoint: its manifest, its table of parameters, and each rank's description.

The manifest is the last file of a save. Of the descriptions it holds only the sum of their checksums, so its
size does not depend on the number of ranks. Nothing here needs torch.

Invariant: a file that is read has every bit that was written, or an error is raised.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from zerodrift.checkpoint.files import open_own, own_file, short
from zerodrift.dtypes import DType
from zerodrift.errors import CheckpointError, Problem, Problems, said
from zerodrift.mesh import MeshShape
from zerodrift.plan import Plan
from zerodrift.record import decode, encode

T = TypeVar("T")
FORMAT = 2
MANIFEST = "checkpoint.json"
PARAMETERS = "parameters.json"
PLAN = "plan.json"
SHARED = "shared.pt"
REMEDY = "Load an older checkpoint, or restore the file from a copy."

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that parsing raises for damaged files, or files of another version."""

Sums = np.ndarray
"""`[5]`, int64: checksums of descriptions, added as four numbers modulo 2^64, and bytes."""
NO_SUMS = np.zeros(5, np.int64)

tensors_file = "__{}_0.distcp".format
state_file = "rank-{:05d}.pt".format
description_file = "rank-{:05d}.json".format
"""Names of the three files of a rank."""


@dataclass(frozen=True, slots=True)
class File:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SavedParameter:
    names: tuple[str, ...]
    """More than one if the parameter is tied."""
    shape: tuple[int, ...]
    dtype: str
    group: int
    """The optimizer's parameter group; -1 for none."""
    moments: tuple[str, ...]
    """torch's names of the moments that were saved."""

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of elements of one flat tensor in a file. Numbers are elements, offset and length bytes."""

    key: str
    numel: int
    """Size of the whole tensor."""
    start: int
    count: int
    dtype: str
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Description:
    save: str
    rank: int
    tensors: File
    state: File
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class RankFiles:
    save: str
    """The name of the save. Each description repeats it, so files of two saves cannot be mixed."""
    ranks: int
    bytes: int
    seal: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The head of a checkpoint."""

    run: str
    """Name of the run, kept when it resumes, so that two runs do not mix their checkpoints."""
    tag: str
    step: int
    skipped: int
    saved: str
    versions: tuple[tuple[str, str], ...]
    source: str
    mode: str
    stage: int
    mesh: MeshShape
    digest: str
    """The plan's digest; empty after a conversion."""
    optimizer: str
    """Kind of the optimizer, which gives moments their meaning; empty without an optimizer."""
    schedule: str
    loss_scale: float
    lr: tuple[float, ...]
    """One per parameter group."""
    ranks: int
    """Ranks that saved random numbers and a client state of their own."""
    parameters: int
    elements: int
    files: tuple[File, ...] = ()
    """All files except the manifest and the files of ranks."""
    digests: tuple[tuple[str, str], ...] = field(default=(), metadata={"omitted": True})
    """Digests of the saved values; empty after a conversion."""
    of_ranks: RankFiles = RankFiles("", 0, 0, "")

    @property
    def file_count(self) -> int:
        return len(self.files) + 3 * self.of_ranks.ranks

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files) + self.of_ranks.bytes


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_whole(folder / MANIFEST, _manifest_text(encode(manifest)))


def _manifest_text(head: Any) -> str:
    return f'{{"format": {FORMAT}, {sealed("checkpoint", json.dumps(head, indent=1))}}}\n'


def sealed(name: str, value: str) -> str:
    """Return two members of a JSON object: the checksum of a value's text, and the value."""
    return f'"sha256": "{hashlib.sha256(value.encode()).hexdigest()}",\n"{name}": {value}'


def write_entries(folder: Path, entries: Iterable[SavedParameter]) -> File:
    rows = ([e.names, e.shape, e.dtype, e.group, e.moments] for e in entries)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return write_whole(folder / PARAMETERS, f"[\n{lines}\n]\n")


def write_plan(folder: Path, plan: dict[str, Any]) -> File:
    return write_whole(folder / PLAN, json.dumps(plan, separators=(",", ":")))


def write_whole(path: Path, text: str | bytes) -> File:
    """Write a small file and flush it to the disk."""
    data = text.encode() if isinstance(text, str) else text
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return File(path.name, len(data), hashlib.sha256(data).hexdigest())


def measured(path: Path) -> File:
    return File(path.name, path.stat().st_size, _sha256(path))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(4 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_description(folder: Path, description: Description) -> Sums:
    rows = [[c.key, c.numel, c.start, c.count, c.dtype, c.offset, c.length] for c in description.chunks]
    files = [encode(description.tensors), encode(description.state)]
    head = {"save": description.save, "rank": description.rank, "files": files, "chunks": rows}
    text = _description_text(json.dumps(head, separators=(",", ":"))).encode()
    write_whole(folder / description_file(description.rank), text)
    return _sums(text, description)


def rank_files(save: str, ranks: int, sums: Sums) -> RankFiles:
    """Return the manifest's entry for all ranks, from their summed checksums."""
    return RankFiles(save, ranks, int(sums[4]), sums[:4].astype("<i8").tobytes().hex())


def _description_text(value: str) -> str:
    return f"{{{sealed('description', value)}}}\n"


def _sums(text: bytes, description: Description) -> Sums:
    size = len(text) + description.tensors.bytes + description.state.bytes
    return np.append(np.frombuffer(hashlib.sha256(text).digest(), "<i8"), np.int64(size))


def _read(folder: Path, name: str, must: str, parse: Callable[[str], T]) -> T:
    """Read a file of the checkpoint; `must` is the clause that refuses a text which cannot be parsed."""
    path = folder / name
    if not os.path.lexists(path):
        raise CheckpointError(path, "must be there", got="no such file", do=REMEDY)
    with open_own(folder, name) as stream:
        data = stream.read()
    try:
        return parse(data.decode())
    except UNREADABLE as error:
        raise CheckpointError(path, must, got=short(said(error)), do=REMEDY) from error


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and verify its own checksum."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        must = f"must hold a `{MANIFEST}`, which is the last file of a save"
        do = "The save was cut short, or this is no checkpoint: load another."
        raise CheckpointError(short(folder), must, got="none", do=do)

    def parse(text: str) -> Manifest:
        document = json.loads(text)
        version, head = document["format"], document["checkpoint"]
        if version != FORMAT:
            do = "Load it with the zerodrift that wrote it, and export its weights there."
            raise CheckpointError(path, f"must be a checkpoint of format {FORMAT}", got=repr(version), do=do)
        # The whole text is compared: the checksum of the parsed document would miss a flipped bit in a blank.
        if text != _manifest_text(head):
            raise ValueError("a text that does not have its checksum")
        return decode(Manifest, head)

    return _read(folder, MANIFEST, "must be the manifest that was written", parse)


def read_entries(folder: Path) -> tuple[SavedParameter, ...]:
    def parse(text: str) -> tuple[SavedParameter, ...]:
        return tuple(_entry(*row) for row in json.loads(text))

    return _read(folder, PARAMETERS, "must be a table of parameters", parse)


def _entry(names: list[str], shape: list[int], dtype: str, group: int, moments: list[str]) -> SavedParameter:
    if not names or not all(isinstance(text, str) for text in (dtype, *names, *moments)):
        raise ValueError("a row without names")
    if not all(type(number) is int and number >= 0 for number in (group + 1, *shape)):
        raise ValueError("a row whose shape or group is not made of whole numbers")
    return SavedParameter(tuple(names), tuple(shape), DType(dtype).value, group, tuple(moments))


def read_plan(folder: Path) -> Plan | None:
    """Read the plan of the save; None after a conversion."""
    if not os.path.lexists(folder / PLAN):
        return None
    must = "must be a plan of this version"
    return _read(folder, PLAN, must, lambda text: Plan.from_json(json.loads(text)))


def read_description(folder: Path, files: RankFiles, rank: int) -> tuple[Description, Sums]:
    """Read one rank's description, and verify that it belongs to the manifest's save."""

    def parse(text: str) -> tuple[Description, Sums]:
        value = text.partition('"description": ')[2][:-2]
        if text != _description_text(value):
            raise ValueError("a text that does not have its checksum")
        head = json.loads(value)
        tensors, state = (File(str(f["name"]), int(f["bytes"]), str(f["sha256"])) for f in head["files"])
        chunks = tuple(_chunk(tensors.name, *row) for row in head["chunks"])
        description = Description(str(head["save"]), int(head["rank"]), tensors, state, chunks)
        return description, _sums(text.encode(), description)

    description, sums = _read(folder, description_file(rank), f"must be as rank {rank} wrote it", parse)
    if (description.save, description.rank) != (files.save, rank):
        must = f"must be of rank {rank} in the save {files.save}"
        got = f"rank {description.rank} in {short(description.save)}"
        raise CheckpointError(folder / description_file(rank), must, got=got, do=REMEDY)
    return description, sums


def _chunk(file: str, key: str, numel: int, start: int, count: int, dtype: str, *place: int) -> Chunk:
    offset, length = place
    if not all(type(number) is int and number >= 0 for number in (numel, start, count, offset, length)):
        raise ValueError("a chunk whose place is not made of whole numbers")
    return Chunk(str(key), numel, start, count, str(dtype), file, offset, length)


def damage(folder: Path, files: Sequence[File], *, content: bool = True) -> list[Problem]:
    """Find files that are missing or have another size and, with `content`, another checksum."""
    problems = []

    def add(path: Path, must: str, got: str) -> None:
        problems.append(Problem(str(path), must, got=got, do=REMEDY))

    for file in files:
        path = folder / file.name
        try:
            size = own_file(folder, file.name).stat().st_size
            if size != file.bytes:
                add(path, f"must have the {file.bytes:,} bytes that were written", f"{size:,}")
            elif content and _sha256(path) != file.sha256:
                add(path, "must be the bits that were written", "others")
        except FileNotFoundError:
            add(path, "must be there", "no such file")
        except OSError as error:
            add(path, "must be readable", error.strerror or str(error))
        except CheckpointError as error:
            add(path, "must be readable", str(error))
    return problems


def damage_seen(
    folder: Path, manifest: Manifest, *, content: bool = True, rank: int = 0, ranks: int = 1
) -> tuple[list[Problem], Sums]:
    """Check one reader's share of the files, and return the sums that `other_files` compares."""
    problems, sums = damage(folder, manifest.files[rank::ranks], content=content), NO_SUMS
    for number in range(rank, manifest.of_ranks.ranks, ranks):
        try:
            description, own = read_description(folder, manifest.of_ranks, number)
        except CheckpointError as error:
            problems += error.problems
        else:
            problems += damage(folder, (description.tensors, description.state), content=content)
            sums = sums + own
    return problems, sums


def other_files(folder: Path, manifest: Manifest, sums: Sums) -> list[Problem]:
    """Compare the summed checksums of all descriptions with the manifest."""
    files = manifest.of_ranks
    if rank_files(files.save, files.ranks, sums) == files:
        return []
    must = f"must hold the files that {files.ranks} ranks wrote"
    return [Problem(str(folder), must, got="others, by the sum of their checksums", do=REMEDY)]


def all_damage(folder: Path, manifest: Manifest, *, content: bool = True) -> list[Problem]:
    """Check all files in one process."""
    problems, sums = damage_seen(folder, manifest, content=content)
    return problems or other_files(folder, manifest, sums)


def raise_damage(damaged: Iterable[Problem]) -> None:
    problems = Problems()
    problems.include(*damaged)
    problems.raise_as(CheckpointError)


def verified(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after verifying every bit of it."""
    manifest = read_manifest(folder)
    raise_damage(all_damage(folder, manifest))
    return manifest
