"""Which chunks of a checkpoint's files hold which elements of its tensors.

Of format 2 each rank's file is described beside it, and the plan says which descriptions to open; of format 1
one file has all chunks.

Invariant: what is found holds each of the elements once.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

from zerodrift.errors import CheckpointError
from zerodrift.io.checkpoint.descriptions import Chunk, read_description
from zerodrift.io.checkpoint.holders import holders
from zerodrift.io.checkpoint.index import OTHER, read_index
from zerodrift.io.checkpoint.manifest import RankFiles, read_manifest, read_plan
from zerodrift.io.paths import short
from zerodrift.plan.table import Plan

_NO_PLAN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What comes of one that was not written by this version."""


class Lookup(Protocol):
    def find(self, key: str, start: int, stop: int) -> Sequence[Chunk]:
        """The chunks with elements `[start, stop)` of a tensor, in their order, or CheckpointError."""


def open_lookup(folder: Path) -> Lookup:
    files = read_manifest(folder).of_ranks
    return _OfIndex(folder) if files is None else _OfDescriptions(folder, files)


class _OfIndex:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = read_index(folder)

    def find(self, key: str, start: int, stop: int) -> Sequence[Chunk]:
        tensor = self._index.get(key)
        if start >= stop:
            return ()
        if tensor is None:
            raise _missing(self._folder, key, ())
        first = bisect.bisect_right(tensor.chunks, start, key=lambda chunk: chunk.start) - 1
        last = bisect.bisect_left(tensor.chunks, stop, key=lambda chunk: chunk.start)
        found = tensor.chunks[max(first, 0) : last]
        if not _hold(found, start, stop):
            raise _missing(self._folder, key, found)
        return found


class _OfDescriptions:
    def __init__(self, folder: Path, files: RankFiles) -> None:
        self._folder, self._files = folder, files
        self._chunks: dict[int, dict[str, list[Chunk]]] = {}
        """Of the ranks whose descriptions were opened, by tensor."""

    def find(self, key: str, start: int, stop: int) -> Sequence[Chunk]:
        if start >= stop:
            return ()
        found = self._of(self._holders(key, start, stop), key, start, stop)
        if not _hold(found, start, stop):
            found = self._of(range(self._files.ranks), key, start, stop)
            if not _hold(found, start, stop):
                raise _missing(self._folder, key, found)
        return found

    def _of(self, ranks: Iterable[int], key: str, start: int, stop: int) -> list[Chunk]:
        found = [
            chunk
            for rank in ranks
            for chunk in self._described(rank).get(key, ())
            if chunk.start < stop and start < chunk.start + chunk.count
        ]
        return sorted(found, key=lambda chunk: chunk.start)

    def _holders(self, key: str, start: int, stop: int) -> Iterable[int]:
        """Which descriptions to open first. What does not follow from the plan is looked for in all."""
        if self._plan is None:
            return ()
        kind, _, name = key.partition(".")
        name = name if kind == "weights" else name.partition(".")[2]
        try:
            ranks = holders(self._plan, name, start, stop)
            return sorted({rank for rank in ranks if 0 <= rank < self._files.ranks})
        except _NO_PLAN:
            return ()

    @cached_property
    def _plan(self) -> Plan | None:
        """None of a checkpoint that was converted, and where another version wrote it in other words."""
        try:
            document = read_plan(self._folder)
            return None if document is None else Plan.from_json(document)
        except _NO_PLAN:
            return None

    def _described(self, rank: int) -> dict[str, list[Chunk]]:
        if rank not in self._chunks:
            by_key = self._chunks[rank] = defaultdict(list)
            for chunk in read_description(self._folder, self._files, rank)[0].chunks:
                by_key[chunk.key].append(chunk)
        return self._chunks[rank]


def _hold(chunks: Sequence[Chunk], start: int, stop: int) -> bool:
    """Whether they have each of the elements once."""
    reached = start
    for number, chunk in enumerate(chunks):
        if chunk.start != reached and (number or chunk.start > start):
            return False
        reached = chunk.start + chunk.count
    return reached >= stop


def _missing(folder: Path, key: str, found: Sequence[Chunk]) -> CheckpointError:
    if not found:
        return CheckpointError(folder, f"must hold the tensor {short(repr(key))}", got="none", do=OTHER)
    must = f"must hold each element of {short(repr(key))} once"
    return CheckpointError(short(folder), must, got="gaps or overlaps", do=OTHER)
