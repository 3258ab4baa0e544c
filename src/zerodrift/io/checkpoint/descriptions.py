"""What each rank wrote of a checkpoint, described beside it: its files, and which elements lie where in them.

A rank writes its own description, and reads those of the ranks whose values it wants; so nobody sends, holds
or writes what grows with the number of ranks. The manifest has the sum of their checksums. No torch here.

Invariant: a description that is read is that of its rank in its save, bit for bit; and where nothing is found
damaged, every file of a checkpoint is as it was written.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerodrift.errors import CheckpointError, Problem, said
from zerodrift.io.checkpoint.manifest import (
    REMEDY,
    File,
    Manifest,
    RankFiles,
    damage,
    raise_damage,
    read_manifest,
    sealed,
    write_whole,
)
from zerodrift.io.paths import own_file, short, unreadable
from zerodrift.record import encode

Sums = np.ndarray
"""`[5]`, int64: checksums of descriptions, added as four numbers modulo 2^64, and bytes."""
NO_SUMS = np.zeros(5, np.int64)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of elements of one tensor, in a file."""

    key: str
    numel: int
    """Of the whole tensor."""
    start: int
    count: int
    dtype: str
    """torch's name for it."""
    file: str
    offset: int
    """Where it begins in the file, in bytes."""
    length: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class Description:
    """What one rank wrote."""

    save: str
    rank: int
    tensors: File
    state: File
    chunks: tuple[Chunk, ...]
    """Of `tensors`, by where they begin."""

    @property
    def files(self) -> tuple[File, File]:
        return self.tensors, self.state


def tensors_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def state_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def description_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


# --- writing ------------------------------------------------------------------------------------------------


def write_description(folder: Path, description: Description) -> Sums:
    """Beside the files; it is on the disk when this returns."""
    rows = [[c.key, c.numel, c.start, c.count, c.dtype, c.offset, c.length] for c in description.chunks]
    files = [encode(file) for file in description.files]
    head = {"save": description.save, "rank": description.rank, "files": files, "chunks": rows}
    text = _text(json.dumps(head, separators=(",", ":"))).encode()
    write_whole(folder / description_file(description.rank), text)
    return _sums(text, description)


def rank_files(save: str, ranks: int, sums: Sums) -> RankFiles:
    """What the manifest says of them; `sums` are of all ranks."""
    return RankFiles(save, ranks, int(sums[4]), _seal(sums))


def _text(value: str) -> str:
    return f"{{{sealed('description', value)}}}\n"


def _sums(text: bytes, description: Description) -> Sums:
    size = len(text) + sum(file.bytes for file in description.files)
    return np.append(np.frombuffer(hashlib.sha256(text).digest(), "<i8"), np.int64(size))


def _seal(sums: Sums) -> str:
    return sums[:4].astype("<i8").tobytes().hex()


# --- reading ------------------------------------------------------------------------------------------------


def read_description(folder: Path, files: RankFiles, rank: int) -> tuple[Description, Sums]:
    """One rank's, of the save that the manifest is of; or CheckpointError."""
    path = folder / description_file(rank)
    try:
        text = own_file(folder, path.name).read_bytes()
        value = text.decode().partition('"description": ')[2][:-2]
        if text.decode() != _text(value):
            raise ValueError("another text than its checksum is of")
        head = json.loads(value)
        tensors, state = (_file(**file) for file in head["files"])
        chunks = tuple(_chunk(tensors.name, *row) for row in head["chunks"])
        found = Description(str(head["save"]), int(head["rank"]), tensors, state, chunks)
        sums = _sums(text, found)
    except FileNotFoundError:
        raise CheckpointError(path, "must be there", got="no such file", do=REMEDY) from None
    except OSError as error:
        raise unreadable(path, error) from error
    except (KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        must = f"must be what rank {rank} wrote"
        raise CheckpointError(path, must, got=short(said(error)), do=REMEDY) from error
    if (found.save, found.rank) != (files.save, rank):
        raise CheckpointError(
            path,
            f"must be of rank {rank} in the save {files.save}",
            got=f"rank {found.rank} in {short(found.save)}",
            do=REMEDY,
        )
    return found, sums


def _file(name: str, bytes: int, sha256: str) -> File:
    return File(str(name), int(bytes), str(sha256))


def _chunk(file: str, key: str, numel: int, start: int, count: int, dtype: str, *place: int) -> Chunk:
    offset, length = place
    if not all(type(number) is int and number >= 0 for number in (numel, start, count, offset, length)):
        raise ValueError("a run of elements that is none")
    return Chunk(str(key), numel, start, count, str(dtype), file, offset, length)


# --- what is damaged ----------------------------------------------------------------------------------------


def damage_seen(
    folder: Path, manifest: Manifest, *, content: bool = True, rank: int = 0, ranks: int = 1
) -> tuple[list[Problem], Sums]:
    """Of the files that one of so many ranks looks at; what those say together is for `other_files`."""
    problems = damage(folder, manifest.files[rank::ranks], content=content)
    files, sums = manifest.of_ranks, NO_SUMS
    if files is None:
        return problems, sums
    for number in range(rank, files.ranks, ranks):
        try:
            description, own = read_description(folder, files, number)
        except CheckpointError as error:
            problems += error.problems
        else:
            problems += damage(folder, description.files, content=content)
            sums = sums + own
    return problems, sums


def other_files(folder: Path, manifest: Manifest, sums: Sums) -> list[Problem]:
    """Whether all descriptions, each of which is whole, are others than those that were written."""
    files = manifest.of_ranks
    if files is None or rank_files(files.save, files.ranks, sums) == files:
        return []
    must = f"must hold the files that {files.ranks} ranks wrote"
    return [Problem(str(folder), must, got="others, by the sum of their checksums", do=REMEDY)]


def all_damage(folder: Path, manifest: Manifest, *, content: bool = True) -> list[Problem]:
    """The same, for one who looks alone."""
    problems, sums = damage_seen(folder, manifest, content=content)
    return problems or other_files(folder, manifest, sums)


def verified(folder: Path) -> Manifest:
    """The manifest of a checkpoint that is as it was written, every bit; raises otherwise."""
    manifest = read_manifest(folder)
    raise_damage(all_damage(folder, manifest))
    return manifest
