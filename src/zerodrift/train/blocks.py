"""Memory maps of blocks: how they lie on disk, and what a block is to a model.

A part (`train`, `validation`) is a map of tokens `[blocks, length]`, a map of the same shape that says
which are learned (left out where all are), and the count of learned ones per block, from which every rank
knows how many labels a whole step has without asking the others.

Invariant: every block has a label, so that no loss is a mean over nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from zerodrift.errors import ConfigError, Problem, Problems

IGNORED = -100
"""The label of a token that is not learned, as torch's cross entropy and `transformers` have it."""


class Maps:
    """Writes the maps of a folder."""

    INDEX = "blocks.json"

    def __init__(self, folder: Path, length: int, vocabulary: int) -> None:
        self.folder = folder
        self.length = length
        self.dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self._files: dict[str, tuple[BinaryIO, BinaryIO]] = {}
        self._counts: dict[str, list[np.ndarray]] = {}
        self._partly: set[str] = set()
        """Parts with blocks of which not all is learned."""

    def write(self, part: str, tokens: np.ndarray, learned: np.ndarray) -> None:
        """Append blocks; those without a label are left out."""
        counts = learned[:, 1:].sum(axis=1, dtype=np.int32)
        keep = counts > 0
        if part not in self._files:
            self._files[part] = ((self._at(part, "tokens")).open("wb"), self._at(part, "learned").open("wb"))
        numbers, marks = self._files[part]
        numbers.write(np.ascontiguousarray(tokens[keep], dtype=self.dtype).tobytes())
        marks.write(np.ascontiguousarray(learned[keep], dtype=np.uint8).tobytes())
        self._counts.setdefault(part, []).append(counts[keep])
        if not learned[keep].all():
            self._partly.add(part)

    def close(self) -> None:
        index: dict[str, object] = {"length": self.length, "dtype": self.dtype.name, "parts": {}}
        parts: dict[str, object] = {}
        for part, files in self._files.items():
            for file in files:
                file.close()
            counts = np.concatenate(self._counts[part])
            np.save(self._at(part, "counts.npy"), counts)
            if part not in self._partly:
                self._at(part, "learned").unlink()
            parts[part] = {"blocks": len(counts), "labels": int(counts.sum())}
        index["parts"] = parts
        (self.folder / self.INDEX).write_text(json.dumps(index, indent=1))

    def _at(self, part: str, what: str) -> Path:
        return self.folder / f"{part}.{what}"


@dataclass(frozen=True)
class Blocks:
    """Blocks to read. Indices are in the order in which they were made."""

    maps: tuple[np.ndarray, ...]
    """`[blocks, length]` each."""
    learned: np.ndarray | None
    """Of the only map; None where all is learned."""
    counts: np.ndarray | None
    """Labels per block; None where all have `length - 1`."""
    length: int

    def __len__(self) -> int:
        return sum(len(part) for part in self.maps)

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """How many labels each of these blocks has."""
        if self.counts is None:
            return np.full(len(indices), self.length - 1, dtype=np.int64)
        return self.counts[indices].astype(np.int64)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels, `[len(indices), length]`, int64; labels are not shifted."""
        tokens = np.stack([self._row(int(index)) for index in indices]).astype(np.int64)
        if self.learned is None:
            return tokens, tokens
        marks = self.learned[indices].astype(bool)
        return tokens, np.where(marks, tokens, IGNORED)

    def _row(self, index: int) -> np.ndarray:
        for part in self.maps:
            if index < len(part):
                return np.asarray(part[index])
            index -= len(part)
        raise AssertionError(f"block {index} is beyond the end")

    def split(self, share: float) -> tuple[Blocks, Blocks]:
        """The blocks before and after: the last `share` of a map is the second."""
        cuts = [min(len(part) - 1, max(1, round(len(part) * share))) for part in self.maps]
        keep = [len(part) - cut for part, cut in zip(self.maps, cuts, strict=True)]
        first = tuple(part[:kept] for part, kept in zip(self.maps, keep, strict=True))
        last = tuple(part[kept:] for part, kept, cut in zip(self.maps, keep, cuts, strict=True) if cut)
        if self.learned is None and self.counts is None:
            return Blocks(first, None, None, self.length), Blocks(last, None, None, self.length)
        (kept,) = keep  # of the only map
        marks = (None, None) if self.learned is None else (self.learned[:kept], self.learned[kept:])
        counts = (None, None) if self.counts is None else (self.counts[:kept], self.counts[kept:])
        return Blocks(first, marks[0], counts[0], self.length), Blocks(last, marks[1], counts[1], self.length)


def open_blocks(folder: Path, part: str) -> Blocks:
    """One part of a folder that `Maps` wrote; empty where it has none."""
    index = json.loads((folder / Maps.INDEX).read_text())
    length, count = index["length"], index["parts"].get(part, {}).get("blocks", 0)
    if not count:
        return Blocks((), None, None, length)
    shape = (count, length)
    tokens = np.memmap(folder / f"{part}.tokens", dtype=index["dtype"], mode="r", shape=shape)
    marks = folder / f"{part}.learned"
    learned = np.memmap(marks, dtype=np.uint8, mode="r", shape=shape) if marks.is_file() else None
    return Blocks((tokens,), learned, np.load(folder / f"{part}.counts.npy", mmap_mode="r"), length)


def open_tokens(files: Sequence[Path], dtype: str, length: int, vocabulary: int) -> Blocks:
    """Blocks straight out of maps of token numbers, which are not copied."""
    problems = Problems()
    maps: list[np.ndarray] = []
    for file in files:
        flat = _flat(file, dtype, problems)
        if flat is None:
            continue
        count = len(flat) // length
        if count and int(flat[:length].max()) >= vocabulary:
            got = f"{int(flat[:length].max())} in its first block"
            todo = "Name the tokenizer that made it in `data.tokenizer`."
            problems.add(str(file), f"must hold tokens below {vocabulary}, the vocabulary", got, todo)
        maps.append(flat[: count * length].reshape(count, length))
    problems.raise_as(ConfigError)
    return Blocks(tuple(part for part in maps if len(part)), None, None, length)


def _flat(file: Path, dtype: str, problems: Problems) -> np.ndarray | None:
    if file.suffix == ".npy":
        try:
            found = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise ConfigError(str(Problem(str(file), "must be a NumPy array", str(error)))) from None
        if found.ndim != 1 or found.dtype.kind not in "ui":
            got = f"{found.dtype} {list(found.shape)}"
            problems.add(str(file), "must be one row of whole numbers", got)
            return None
        return np.asarray(found) if not isinstance(found, np.memmap) else found
    size = np.dtype(dtype).itemsize
    if file.stat().st_size % size or not file.stat().st_size:
        problems.add(str(file), f"must hold {dtype} numbers", f"{file.stat().st_size} bytes")
        return None
    return np.memmap(file, dtype=dtype, mode="r")
