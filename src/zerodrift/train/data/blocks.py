"""Store blocks of tokens on disk with their loss masks, and read them back.

Each part of the data (`train`, `validation`) has a file of tokens, and a file of marks unless all tokens are
learned. A mark says whether a token is learned, and whether it is the first of a separate document. Two more
files have the number of labels and the checksums of each block. Every rank knows the labels of a step from
them, without communication. Blocks are not memory-mapped: a mapped file that is cut short kills its process.

Every block has a label, so no loss is a mean over nothing. Every token that is read is in the vocabulary.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zerodrift.errors import ConfigError, Problems, first_line, said
from zerodrift.files import opened

IGNORED = -100
"""Label of a token that is not learned, as in torch's cross entropy."""
INDEX = "blocks.json"
MARK = np.dtype(np.uint8)
LEARNED, STARTS = 1, 2
"""Marks of a token: it is learned; it is the first token of a separate document."""


def checksums(tokens: np.ndarray, marks: np.ndarray, labels: int) -> tuple[int, int]:
    """Return the checksums of a block's tokens with their number of labels, and of its marks."""
    return zlib.crc32(tokens.tobytes(), labels), zlib.crc32(marks.tobytes())


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def write_index(folder: Path, length: int, vocabulary: int, parts: Mapping[str, Any], **more: Any) -> None:
    """Write the index: counts of each part, `apart` (separate documents) and `reading` (data counts)."""
    sizes = {"length": length, "dtype": token_dtype(vocabulary).name, "vocabulary": vocabulary}
    (folder / INDEX).write_text(_sealed({**sizes, "parts": parts, **more}))


def _sealed(index: dict[str, Any]) -> str:
    text = json.dumps(index, indent=1)
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of equal length in a file, which must not change while they are read."""

    file: Path
    dtype: np.dtype[Any]
    offset: int
    """Bytes in front of the first row."""
    count: int
    length: int
    stamp: tuple[int, int]
    """Size and time of the file when it was opened."""

    @staticmethod
    def of(file: Path, dtype: np.dtype[Any], length: int, offset: int = 0, numbers: int = -1) -> Rows:
        """Return the whole rows of a file, or of its first `numbers` values."""
        stat = file.stat()
        held = (stat.st_size - offset) // dtype.itemsize if numbers < 0 else numbers
        return Rows(file, dtype, offset, held // length, length, (stat.st_size, stat.st_mtime_ns))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> np.ndarray:
        size = self.length * self.dtype.itemsize
        try:
            with opened(self.file) as stream:
                stat = os.fstat(stream.fileno())
                data = os.pread(stream.fileno(), size, self.offset + index * size)
            is_same = (stat.st_size, stat.st_mtime_ns) == self.stamp and len(data) == size
            got = "" if is_same else f"{stat.st_size:,} bytes for {self.stamp[0]:,}, or another time"
        except OSError as error:
            got = error.strerror or said(error)
        if got:
            todo = "Start again to resume from the last checkpoint, if the tokens are the same."
            raise ConfigError(str(self.file), "must not change while a run reads it", got=got, do=todo)
        return np.frombuffer(data, self.dtype)

    def part(self, chosen: slice) -> Rows:
        first, end, _ = chosen.indices(self.count)
        offset = self.offset + first * self.length * self.dtype.itemsize
        return replace(self, offset=offset, count=end - first)


@dataclass(frozen=True, slots=True)
class BlockValues:
    """Blocks that were read. Shape [blocks, length], int64."""

    tokens: np.ndarray
    labels: np.ndarray
    """Not shifted; the same array as `tokens` where all are learned."""
    positions: np.ndarray | None
    """Position of each token in its document, where documents of a block do not see each other."""


@dataclass(frozen=True)
class Blocks:
    """Blocks in a file, numbered in the order in which they were written."""

    rows: Rows
    """Tokens. Shape [blocks, length]."""
    vocabulary: int
    marks: Rows | None = None
    """Shape [blocks, length]; None if all tokens are learned."""
    counts: np.ndarray | None = None
    """Labels of each block; None if all have `length - 1`."""
    sums: np.ndarray | None = None
    """Checksums of tokens and marks, shape [blocks, 2]; None for token maps of other programs."""
    separate_documents: bool = False

    @property
    def length(self) -> int:
        return self.rows.length

    def __len__(self) -> int:
        return len(self.rows)

    def labels(self, indices: np.ndarray) -> np.ndarray:
        if self.counts is None:
            return np.full(len(indices), self.length - 1, dtype=np.int64)
        return self.counts[indices].astype(np.int64)

    def read(self, indices: np.ndarray) -> BlockValues:
        read = [self._block(int(index)) for index in indices]
        tokens = np.stack([tokens for tokens, _ in read])
        labels, starts = tokens, np.zeros_like(tokens)
        if self.marks is not None:
            starts = np.stack([marks for _, marks in read if marks is not None])
            labels = np.where(starts & LEARNED, tokens, IGNORED)
        if not self.separate_documents:
            return BlockValues(tokens, labels, None)
        places = np.broadcast_to(np.arange(self.length), tokens.shape)
        firsts = np.maximum.accumulate(np.where(starts & STARTS, places, 0), axis=1)
        return BlockValues(tokens, labels, (places - firsts).astype(np.int64))

    def _block(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        tokens, marks = self.rows[index], None if self.marks is None else self.marks[index]
        if self.sums is not None and self.counts is not None:
            held = np.full(self.length, LEARNED, MARK) if marks is None else marks
            if checksums(tokens, held, int(self.counts[index])) != tuple(self.sums[index].tolist()):
                raise damaged(self.rows.file.parent, f"another block {index}")
        _check_tokens(tokens, self.rows, self.vocabulary, f"block {index}")
        return tokens.astype(np.int64), marks

    def split(self, share: float) -> tuple[Blocks, Blocks]:
        """Split off the last `share` of the blocks: at least one, unless there is only one."""
        kept = len(self) - min(len(self) - 1, max(1, round(len(self) * share)))
        return self._part(slice(kept)), self._part(slice(kept, None))

    def _part(self, chosen: slice) -> Blocks:
        return replace(
            self,
            rows=self.rows.part(chosen),
            marks=None if self.marks is None else self.marks.part(chosen),
            counts=None if self.counts is None else self.counts[chosen],
            sums=None if self.sums is None else self.sums[chosen],
        )


def _check_tokens(tokens: np.ndarray, rows: Rows, vocabulary: int, place: str) -> None:
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        must = f"must hold tokens below {vocabulary}, the vocabulary, and none below 0"
        got = f"{tokens.min()} to {tokens.max()} in {place}"
        todo = "Name the tokenizer that made it in `data.tokenizer`."
        raise ConfigError(str(rows.file), must, got=got, do=todo)


def read_index(folder: Path) -> dict[str, Any]:
    try:
        with opened(folder / INDEX) as stream:
            written = stream.read().decode()
        index = json.loads(written[: written.rstrip().rfind("\n")])
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, first_line(error)) from None
    if not isinstance(index, dict) or _sealed(index) != written:
        raise damaged(folder, "another index than was written")
    return index


def open_blocks(folder: Path, part: str) -> Blocks | None:
    """Open one part of a folder of blocks; return None for a part without blocks."""
    index = read_index(folder)
    length, vocabulary = index["length"], index["vocabulary"]
    count = index["parts"].get(part, {}).get("blocks", 0)
    if not count:
        return None
    try:
        tokens = Rows.of(folder / f"{part}.tokens", np.dtype(index["dtype"]), length)
        file = folder / f"{part}.marks"
        marks = Rows.of(file, MARK, length) if file.is_file() else None
        counts = np.memmap(folder / f"{part}.counts", np.int32, "r")
        sums = np.memmap(folder / f"{part}.sums", np.uint32, "r").reshape(-1, 2)
    except (OSError, ValueError) as error:
        raise damaged(folder, first_line(error)) from None
    if {len(rows) for rows in (tokens, counts, sums, marks) if rows is not None} != {count}:
        raise damaged(folder, f"files of other lengths than {count} blocks")
    return Blocks(tokens, vocabulary, marks, counts, sums, index["apart"])


def damaged(folder: Path, got: str) -> ConfigError:
    todo = "It is damaged: remove the folder and start again. The same blocks are made again, in their order."
    return ConfigError(str(folder), "must hold the blocks that were written", got=got, do=todo)


def open_tokens(files: Sequence[Path], dtype: str, length: int, vocabulary: int) -> list[Blocks]:
    """Open `.npy` and `.bin` files of token numbers as blocks, without a copy; omit those without a block."""
    problems = Problems()
    found = []
    for file in files:
        try:
            rows = _npy_rows(file, length) if file.suffix == ".npy" else _bin_rows(file, dtype, length)
            if len(rows):
                found.append(Blocks(rows, vocabulary))
                _check_first(rows, vocabulary)
        except ConfigError as error:
            problems.include(*error.problems)
        except Exception as error:  # a damaged header makes NumPy raise nearly anything
            got = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
            problems.add(str(file), "must be a file of token numbers", got=got)
    problems.raise_as(ConfigError)
    return found


def _npy_rows(file: Path, length: int) -> Rows:
    array, size = np.load(file, mmap_mode="r", allow_pickle=False), file.stat().st_size
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.kind not in "ui":
        got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "several arrays"
        raise ConfigError(str(file), "must be one row of whole numbers", got=got)
    if size != array.offset + array.nbytes:
        must = f"must have the {array.offset + array.nbytes:,} bytes that its header says"
        raise ConfigError(str(file), must, got=f"{size:,} bytes")
    return Rows.of(file, array.dtype, length, array.offset, len(array))


def _bin_rows(file: Path, dtype: str, length: int) -> Rows:
    number, size = np.dtype(dtype), file.stat().st_size
    if size % number.itemsize or not size:
        raise ConfigError(str(file), f"must hold {dtype} numbers", got=f"{size} bytes")
    return Rows.of(file, number, length)


def _check_first(rows: Rows, vocabulary: int) -> None:
    """Refuse a map whose first blocks show another vocabulary or dtype."""
    first = rows[0]
    _check_tokens(first, rows, vocabulary, "its first block")
    # Fewer than 64 tokens could have these zeros by chance.
    some = np.concatenate([rows[index] for index in range(min(len(rows), -(-64 // rows.length)))])
    if rows.dtype == np.uint16 and first[::2].any() and len(some) >= 64 and not some[1::2].any():
        got = "a 0 in every second place, as 32-bit numbers have"
        todo = "Set `data.token_dtype: uint32`."
        raise ConfigError(str(rows.file), "must hold uint16 numbers", got=got, do=todo)
