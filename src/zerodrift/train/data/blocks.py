"""Memory maps of blocks: how they lie on disk, and what a block is to a model.

A part (`train`, `validation`) is a map of tokens `[blocks, length]`, a map of marks of the same shape that
says which are learned and where documents start (left out where all are learned), the count of labels per
block, from which every rank knows how many labels a whole step has without asking the others, and a checksum
per block.

Blocks are read when they are asked for and not mapped into memory: of a file that is cut short while it is
mapped, a process dies without a word.

Invariant: every block has a label, so that no loss is a mean over nothing, and every token that is read is
below the vocabulary and of the file that was opened.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zerodrift.errors import ConfigError, Problems, first_line, said
from zerodrift.files import kind, opened

IGNORED = -100
"""The label of a token that is not learned, as torch's cross entropy and `transformers` have it."""
_MARK = np.dtype(np.uint8)
LEARNED, STARTS = 1, 2
"""Marks of a token: that it is learned; that it is the first of a document that sees no other."""


def _checksums(tokens: np.ndarray, marks: np.ndarray, labels: int) -> tuple[int, int]:
    """Of a block as it lies on disk: its tokens with their labels' count, and its marks."""
    return zlib.crc32(tokens.tobytes(), labels), zlib.crc32(marks.tobytes())


class Maps:
    """Writes the maps of a folder."""

    INDEX = "blocks.json"

    def __init__(self, folder: Path, length: int, vocabulary: int, apart: bool = False) -> None:
        self.folder = folder
        self.length = length
        self.vocabulary = vocabulary
        self.apart = apart
        """Whether documents that share a block do not see each other."""
        self.dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self._files: dict[str, tuple[BinaryIO, BinaryIO]] = {}
        self._counts: dict[str, list[np.ndarray]] = {}
        self._sums: dict[str, list[np.ndarray]] = {}
        self._marked: set[str] = set()
        """Parts with blocks whose marks say something."""

    def write(self, part: str, tokens: np.ndarray, marks: np.ndarray) -> np.ndarray:
        """Append blocks but those without a label; says which were."""
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocabulary:
            got = f"{tokens.min()} to {tokens.max()}"
            must = f"must make tokens from 0 to {self.vocabulary - 1}"
            raise ConfigError("data.tokenizer", must, got=got)
        marks = np.where(marks & STARTS, marks & STARTS, marks) if self.apart else marks & LEARNED
        # The first token of a document follows from nothing, and that of a block neither.
        counts = (marks[:, 1:] & LEARNED).sum(axis=1, dtype=np.int32)
        keep: np.ndarray = counts > 0
        if part not in self._files:
            self._files[part] = ((self._at(part, "tokens")).open("wb"), self._at(part, "marks").open("wb"))
        numbers, held = self._files[part]
        tokens, marks, counts = tokens[keep].astype(self.dtype), marks[keep].astype(_MARK), counts[keep]
        numbers.write(tokens.tobytes())
        held.write(marks.tobytes())
        sums = [_checksums(*block) for block in zip(tokens, marks, counts.tolist(), strict=True)]
        self._counts.setdefault(part, []).append(counts)
        self._sums.setdefault(part, []).append(np.array(sums, np.uint32).reshape(-1, 2))
        if (marks != LEARNED).any():
            self._marked.add(part)
        return keep

    def close(self, reading: dict[str, Any]) -> None:
        """Write what is known of the blocks, and of what was read."""
        parts: dict[str, object] = {}
        self.release()
        for part in self._files:
            counts = np.concatenate(self._counts[part])
            counts.tofile(self._at(part, "counts"))
            if part not in self._marked:
                self._at(part, "marks").unlink()
            parts[part] = {"blocks": len(counts), "labels": int(counts.sum())}
            np.concatenate(self._sums[part]).tofile(self._at(part, "sums"))
        index = {
            "length": self.length,
            "dtype": self.dtype.name,
            "vocabulary": self.vocabulary,
            "parts": parts,
            "apart": self.apart,
            "reading": reading,
        }
        (self.folder / self.INDEX).write_text(_sealed(index))

    def release(self) -> None:
        """Close what is open, whatever became of it."""
        for file in (file for files in self._files.values() for file in files):
            file.close()

    def _at(self, part: str, what: str) -> Path:
        return self.folder / f"{part}.{what}"


def _sealed(index: dict[str, Any]) -> str:
    text = json.dumps(index, indent=1)
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of equal length in a file."""

    file: Path
    dtype: np.dtype[Any]
    offset: int
    """Bytes in front of the first."""
    count: int
    length: int
    stamp: tuple[int, int]
    """Size and time of the file when it was opened."""

    @staticmethod
    def of(file: Path, dtype: np.dtype[Any], length: int, offset: int = 0, numbers: int = -1) -> Rows:
        """Those of a file, or of `numbers` of it; what is left at the end is no row."""
        stat = file.stat()
        held = (stat.st_size - offset) // dtype.itemsize if numbers < 0 else numbers
        return Rows(file, dtype, offset, held // length, length, (stat.st_size, stat.st_mtime_ns))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        size = self.length * self.dtype.itemsize
        todo = "Start again to go on from the last checkpoint, if the tokens are the same."
        must = "must stay as it is while a run reads it"
        try:
            with opened(self.file) as stream:
                stat = os.fstat(stream.fileno())
                data = os.pread(stream.fileno(), size, self.offset + index * size)
        except OSError as error:
            got = error.strerror or said(error)
            raise ConfigError(str(self.file), must, got=got, do=todo) from None
        if (stat.st_size, stat.st_mtime_ns) != self.stamp or len(data) < size:
            got = f"{stat.st_size:,} bytes for {self.stamp[0]:,}, or another time"
            raise ConfigError(str(self.file), must, got=got, do=todo)
        return np.frombuffer(data, self.dtype)

    def before(self, row: int) -> Rows:
        return replace(self, count=row)

    def after(self, row: int) -> Rows:
        size = self.length * self.dtype.itemsize
        return replace(self, offset=self.offset + row * size, count=self.count - row)


@dataclass(frozen=True, slots=True)
class Read:
    """Some blocks, `[blocks, length]` each, int64."""

    tokens: np.ndarray
    labels: np.ndarray
    """Not shifted; the tokens themselves where all are learned."""
    positions: np.ndarray | None
    """Of each token in its document, where documents that share a block do not see each other."""


@dataclass(frozen=True)
class Blocks:
    """Blocks to read. Indices are in the order in which they were made."""

    maps: tuple[Rows, ...]
    """`[blocks, length]` each."""
    marks: Rows | None
    """Of the only map; None where all is learned."""
    counts: np.ndarray | None
    """Labels per block; None where all have `length - 1`."""
    length: int
    vocabulary: int
    sums: np.ndarray | None = None
    """`[blocks, 2]`, checksums of the only map's and of the marks; None for files of somebody else."""
    apart: bool = False
    """Whether documents that share a block do not see each other."""

    def __len__(self) -> int:
        return sum(len(part) for part in self.maps)

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """How many labels each of these blocks has."""
        if self.counts is None:
            return np.full(len(indices), self.length - 1, dtype=np.int64)
        return self.counts[indices].astype(np.int64)

    def read(self, indices: np.ndarray) -> Read:
        read = [self._block(int(index)) for index in indices]
        tokens = np.stack([tokens for tokens, _ in read])
        if self.marks is None:
            return Read(tokens, tokens, _positions(np.zeros_like(tokens)) if self.apart else None)
        marks = np.stack([marks for _, marks in read if marks is not None])
        labels = np.where(marks & LEARNED, tokens, IGNORED)
        return Read(tokens, labels, _positions(marks) if self.apart else None)

    def _block(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        part, place = self._locate(index)
        tokens, marks = part[place], None if self.marks is None else self.marks[index]
        if self.sums is not None and self.counts is not None:
            held = np.full(self.length, LEARNED, _MARK) if marks is None else marks
            if _checksums(tokens, held, int(self.counts[index])) != tuple(self.sums[index].tolist()):
                raise damaged(part.file.parent, f"another block {index}")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocabulary:
            got = f"{tokens.min()} to {tokens.max()} in block {place}"
            raise ConfigError(str(part.file), _below(self.vocabulary), got=got, do=_TOKENIZER)
        return tokens.astype(np.int64), marks

    def _locate(self, index: int) -> tuple[Rows, int]:
        for part in self.maps:
            if index < len(part):
                return part, index
            index -= len(part)
        raise AssertionError(f"block {index} is beyond the end")

    def split(self, share: float) -> tuple[Blocks, Blocks]:
        """The blocks before and after: the last `share` of a map is the second."""
        cuts = [min(len(part) - 1, max(1, round(len(part) * share))) for part in self.maps]
        keep = [len(part) - cut for part, cut in zip(self.maps, cuts, strict=True)]
        first = tuple(part.before(kept) for part, kept in zip(self.maps, keep, strict=True))
        last = tuple(part.after(kept) for part, kept, cut in zip(self.maps, keep, cuts, strict=True) if cut)
        if self.counts is None or self.sums is None:
            return replace(self, maps=first), replace(self, maps=last)
        (kept,) = keep  # of the only map
        marks = (None, None) if self.marks is None else (self.marks.before(kept), self.marks.after(kept))
        return (
            replace(self, maps=first, marks=marks[0], counts=self.counts[:kept], sums=self.sums[:kept]),
            replace(self, maps=last, marks=marks[1], counts=self.counts[kept:], sums=self.sums[kept:]),
        )


def _positions(marks: np.ndarray) -> np.ndarray:
    """The place of each token since the last start, `[blocks, length]`."""
    places = np.broadcast_to(np.arange(marks.shape[1]), marks.shape)
    starts = np.maximum.accumulate(np.where(marks & STARTS, places, 0), axis=1)
    return (places - starts).astype(np.int64)


def _below(vocabulary: int) -> str:
    return f"must hold tokens below {vocabulary}, the vocabulary, and none below 0"


_TOKENIZER = "Name the tokenizer that made it in `data.tokenizer`."


# --- of our own ---------------------------------------------------------------------------------------


def read_index(folder: Path) -> dict[str, Any]:
    """What `Maps` says of a folder."""
    try:
        with opened(folder / Maps.INDEX) as stream:
            written = stream.read().decode()
        index = json.loads(written[: written.rstrip().rfind("\n")])
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, first_line(error)) from None
    if not isinstance(index, dict) or _sealed(index) != written:
        raise damaged(folder, "another index than was written")
    return index


def open_blocks(folder: Path, part: str) -> Blocks:
    """One part of a folder that `Maps` wrote; empty where it has none."""
    index = read_index(folder)
    length, vocabulary = index["length"], index["vocabulary"]
    count = index["parts"].get(part, {}).get("blocks", 0)
    if not count:
        return Blocks((), None, None, length, vocabulary)
    try:
        tokens = Rows.of(folder / f"{part}.tokens", np.dtype(index["dtype"]), length)
        held = folder / f"{part}.marks"
        marks = Rows.of(held, _MARK, length) if held.is_file() else None
        counts = _numbers(folder / f"{part}.counts", np.dtype(np.int32))
        sums = _numbers(folder / f"{part}.sums", np.dtype(np.uint32)).reshape(-1, 2)
    except (OSError, ValueError) as error:
        raise damaged(folder, first_line(error)) from None
    rows = (tokens, counts, sums) if marks is None else (tokens, counts, sums, marks)
    if {len(part) for part in rows} != {count}:
        raise damaged(folder, f"files of other lengths than {count} blocks")
    return Blocks((tokens,), marks, counts, length, vocabulary, sums, index["apart"])


def _numbers(file: Path, dtype: np.dtype[Any]) -> np.ndarray:
    if odd := kind(file):
        raise ValueError(f"{odd} at {file.name}")
    return np.memmap(file, dtype, "r")


def damaged(folder: Path, got: str) -> ConfigError:
    """That a folder is not as it was written."""
    todo = "It is damaged: remove the folder, and start again; blocks are made anew and go on in their order."
    return ConfigError(str(folder), "must hold the blocks that were written", got=got, do=todo)


# --- of somebody else -----------------------------------------------------------------------------------


def open_tokens(files: Sequence[Path], dtype: str, length: int, vocabulary: int) -> Blocks:
    """Blocks straight out of maps of token numbers, which are not copied."""
    problems = Problems()
    maps = [
        rows for file in files if (rows := _tokens(file, dtype, length, vocabulary, problems)) is not None
    ]
    problems.raise_as(ConfigError)
    return Blocks(tuple(part for part in maps if len(part)), None, None, length, vocabulary)


def _tokens(file: Path, dtype: str, length: int, vocabulary: int, problems: Problems) -> Rows | None:
    try:
        rows = (
            _array(file, length, problems) if file.suffix == ".npy" else _plain(file, dtype, length, problems)
        )
    except Exception as error:  # a damaged header makes NumPy raise nearly anything
        got = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        problems.add(str(file), "must be a file of token numbers", got=got)
        return None
    if rows is None or not len(rows):
        return rows
    first = rows[0]
    if int(first.min()) < 0 or int(first.max()) >= vocabulary:
        got = f"{first.min()} to {first.max()} in its first block"
        problems.add(str(file), _below(vocabulary), got=got, do=_TOKENIZER)
    elif rows.dtype == np.uint16 and first[::2].any() and _every_second_is_zero(rows):
        got = "a 0 in every second place, as 32-bit numbers have"
        problems.add(str(file), "must hold uint16 numbers", got=got, do="Set `data.token_dtype: uint32`.")
    return rows


def _every_second_is_zero(rows: Rows) -> bool:
    """Of the first blocks, together long enough for it to be no accident."""
    some = np.concatenate([rows[index] for index in range(min(len(rows), -(-64 // rows.length)))])
    return len(some) >= 64 and not some[1::2].any()


def _array(file: Path, length: int, problems: Problems) -> Rows | None:
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.kind not in "ui":
        got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "several arrays"
        problems.add(str(file), "must be one row of whole numbers", got=got)
        return None
    if file.stat().st_size != array.offset + array.nbytes:
        got = f"{file.stat().st_size:,} bytes"
        must = f"must have the {array.offset + array.nbytes:,} bytes that its header says"
        problems.add(str(file), must, got=got)
        return None
    return Rows.of(file, array.dtype, length, array.offset, len(array))


def _plain(file: Path, dtype: str, length: int, problems: Problems) -> Rows | None:
    number, size = np.dtype(dtype), file.stat().st_size
    if size % number.itemsize or not size:
        problems.add(str(file), f"must hold {dtype} numbers", got=f"{size} bytes")
        return None
    return Rows.of(file, number, length)
