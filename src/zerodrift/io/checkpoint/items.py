"""Flat pieces of parameters to and from `torch.distributed.checkpoint` (DCP) files.

A parameter's weight and each of its moments is one DCP tensor of one dimension, `weights.<name>` and
`moments.<key>.<name>`, cut into chunks wherever ranks or size cut it; the real shape is in the table of
parameters. DCP's own reader reads these files. Its writer would keep every tensor of a file until the file
is closed (torch 2.13), so the same bytes are written here, one chunk at a time; where each lies is
`lookup`'s business.

Invariant: neither direction holds more than one chunk beside the caller's tensors.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from zerodrift.dtypes import DType
from zerodrift.errors import CheckpointError, said
from zerodrift.io.checkpoint.descriptions import Chunk
from zerodrift.io.checkpoint.index import OTHER
from zerodrift.io.checkpoint.lookup import open_lookup
from zerodrift.io.checkpoint.manifest import File, SavedParameter
from zerodrift.io.paths import open_own

CHUNK = 8 << 20
"""Elements of one chunk at most: what a reader must hold to get at one of its elements."""


def weight_key(name: str) -> str:
    return f"weights.{name}"


def moment_key(key: str, name: str) -> str:
    return f"moments.{key}.{name}"


@dataclass(frozen=True, slots=True)
class Item:
    """A run of elements of one DCP tensor."""

    key: str
    numel: int
    """Of the whole tensor."""
    start: int
    values: torch.Tensor


# --- writing ------------------------------------------------------------------------------------------


def write_items(path: Path, items: Iterable[Item]) -> tuple[File, list[Chunk]]:
    """A DCP file; it is on the disk when this returns."""
    chunks = []
    with path.open("wb") as raw:
        stream = _Hashed(raw)
        for item in items:
            for low in range(0, item.values.numel(), CHUNK):
                values = item.values[low : low + CHUNK].detach().cpu()
                if values.untyped_storage().nbytes() != values.nbytes:
                    values = values.clone()  # torch.save writes the whole storage
                offset = stream.count
                torch.save(values, cast(IO[bytes], stream))
                chunks.append(
                    Chunk(
                        item.key,
                        item.numel,
                        item.start + low,
                        values.numel(),
                        str(values.dtype).removeprefix("torch."),
                        path.name,
                        offset,
                        stream.count - offset,
                    )
                )
        raw.flush()
        os.fsync(raw.fileno())
    return File(path.name, stream.count, stream.digest()), chunks


class _Hashed(io.RawIOBase):
    """A stream that counts and hashes what goes through it."""

    def __init__(self, raw: Any) -> None:
        super().__init__()
        self._raw, self._hash = raw, hashlib.sha256()
        self.count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._raw.write(data)
        self._hash.update(data)
        size = memoryview(data).nbytes
        self.count += size
        return size

    def digest(self) -> str:
        return self._hash.hexdigest()


# --- reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Destination:
    """A run of elements of one DCP tensor, and where they are to go."""

    key: str
    start: int
    into: torch.Tensor
    """`[elements]`, in any dtype and on any device."""


class CheckpointReader:
    """The DCP files of one checkpoint, of which every rank reads what it wants."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lookup = open_lookup(folder)

    def check(self, entry: SavedParameter, start: int = 0, stop: int | None = None) -> None:
        """That a run of elements of a parameter, or all, and of its moments, is there."""
        numel = math.prod(entry.shape)
        for key in (weight_key(entry.name), *(moment_key(key, entry.name) for key in entry.moments)):
            for chunk in self._lookup.find(key, start, numel if stop is None else stop):
                if chunk.numel != numel:
                    must = f"must hold {numel:,} elements of {key!r}"
                    raise CheckpointError(self._folder, must, got=f"{chunk.numel:,}", do=OTHER)

    def read(self, wanted: Sequence[Destination]) -> None:
        """Fill every `into`."""
        parts: list[tuple[Chunk, Destination]] = []
        for want in wanted:
            chunks = self._lookup.find(want.key, want.start, want.start + want.into.numel())
            parts += ((chunk, want) for chunk in chunks)
        # In the order of the files; what several runs want of one chunk follows each other.
        parts.sort(key=lambda part: (part[0].file, part[0].offset))
        for chunk, of in itertools.groupby(parts, key=lambda part: part[0]):
            values = self._chunk(chunk)
            for _, want in of:
                low = max(want.start, chunk.start)
                high = min(want.start + want.into.numel(), chunk.start + chunk.count)
                into = want.into[low - want.start : high - want.start]
                into.copy_(values[low - chunk.start : high - chunk.start])
            del values

    def _chunk(self, chunk: Chunk) -> torch.Tensor:
        """One chunk, in memory of its own."""
        try:
            with open_own(self._folder, chunk.file) as stream:
                stream.seek(chunk.offset)
                data = io.BytesIO(stream.read(chunk.length))
            values = torch.load(data, map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(self._folder, "must be readable", got=said(error), do=OTHER) from error
        if not (
            isinstance(values, torch.Tensor)
            and (str(values.dtype), values.shape) == (f"torch.{chunk.dtype}", (chunk.count,))
        ):
            raise CheckpointError(
                self._folder,
                f"must hold {chunk.count:,} elements of {chunk.dtype} of {chunk.key!r} where its metadata "
                "says",
                got="something else",
                do=OTHER,
            )
        return values

    def weight(self, entry: SavedParameter) -> torch.Tensor:
        """A whole weight in its own dtype: for tools that work on one parameter at a time."""
        into = torch.empty(math.prod(entry.shape), dtype=DType(entry.dtype).torch)
        self.read([Destination(weight_key(entry.name), 0, into)])
        return into.view(entry.shape)
