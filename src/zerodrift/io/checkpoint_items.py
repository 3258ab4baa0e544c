"""Flat pieces of parameters to and from `torch.distributed.checkpoint` (DCP) files.

A parameter's weight and each of its moments is one DCP tensor of one dimension, `weights.<name>` and
`moments.<key>.<name>`, cut into chunks wherever ranks or size cut it; the real shape is in the table of
parameters. DCP's own reader reads these files. Its writer would keep every tensor of a file until the file
is closed (torch 2.13), so the same bytes are written here, one chunk at a time.

Invariant: neither direction holds more than one chunk beside the caller's tensors.

[Note: DCP] What is private in torch is touched in this file alone: `_StorageInfo`, where an item lies in a
file. Tested on torch 2.11 to 2.13.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from zerodrift.errors import CheckpointError, said
from zerodrift.io.checkpoint_manifest import File, measured

CHUNK = 8 << 20
"""Elements of one chunk at most: what a reader must hold to get at one of its elements."""
INDEX = ".metadata"


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


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk in a file."""

    key: str
    numel: int
    """Of the whole tensor."""
    start: int
    count: int
    dtype: torch.dtype
    file: str
    offset: int
    """Where it begins in the file, in bytes."""
    length: int
    """In bytes."""


# --- writing ------------------------------------------------------------------------------------------


def write_items(path: Path, items: Iterable[Item]) -> tuple[File, list[Written]]:
    """A DCP file; it is on the disk when this returns."""
    found = []
    with path.open("wb") as raw:
        stream = _Hashed(raw)
        for item in items:
            for low in range(0, item.values.numel(), CHUNK):
                values = item.values[low : low + CHUNK].detach().cpu()
                if values.untyped_storage().nbytes() != values.nbytes:
                    values = values.clone()  # torch.save writes the whole storage
                offset = stream.count
                torch.save(values, cast(IO[bytes], stream))
                found.append(
                    Written(
                        item.key,
                        item.numel,
                        item.start + low,
                        values.numel(),
                        values.dtype,
                        path.name,
                        offset,
                        stream.count - offset,
                    )
                )
        raw.flush()
        os.fsync(raw.fileno())
    return File(path.name, stream.count, stream.digest()), found


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


def write_index(folder: Path, written: Iterable[Written]) -> File:
    """DCP's own metadata over the files of all ranks."""
    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    for chunk in written:
        tensor = tensors.get(chunk.key)
        if tensor is None:
            properties = TensorProperties(dtype=chunk.dtype)
            tensor = tensors[chunk.key] = TensorStorageMetadata(properties, torch.Size([chunk.numel]), [])
        offset = torch.Size([chunk.start])
        tensor.chunks.append(ChunkStorageMetadata(offset, torch.Size([chunk.count])))
        results.append(
            WriteResult(
                MetadataIndex(chunk.key, offset),
                chunk.length,
                _StorageInfo(chunk.file, chunk.offset, chunk.length),
            )
        )
    FileSystemWriter(folder).finish(Metadata(tensors), [results])  # type: ignore[arg-type]
    return measured(folder / INDEX)


# --- reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run of elements of one DCP tensor, and where they are to go."""

    key: str
    start: int
    into: torch.Tensor
    """`[elements]`, in any dtype and on any device."""


class Reader:
    """The DCP files of one checkpoint, of which every rank reads what it wants."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = FileSystemReader(folder)
        with self._readable():
            self._metadata = self._files.read_metadata()
            self._files.set_up_storage_reader(self._metadata, is_coordinator=False)

    def __contains__(self, key: str) -> bool:
        return key in self._metadata.state_dict_metadata

    def keys(self) -> Iterator[str]:
        yield from self._metadata.state_dict_metadata

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).properties.dtype

    def numel(self, key: str) -> int:
        return self._tensor(key).size.numel()

    def _tensor(self, key: str) -> TensorStorageMetadata:
        found = self._metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"`{self._folder}`: must hold the tensor {key!r}; got none. {_OTHER}")
        return found

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill every `into`."""
        planner = _Filling(wanted)
        items: list[ReadItem] = []
        for want in wanted:
            count = want.into.numel()
            chunk = ChunkStorageMetadata(torch.Size([want.start]), torch.Size([count]))
            found = create_read_items_for_chunk_list(want.key, self._tensor(want.key), [chunk])
            if sum(item.lengths[0] for item in found) != count:
                raise CheckpointError(
                    f"`{self._folder}`: must hold elements {want.start} to {want.start + count} of "
                    f"{want.key!r}; got part of them. {_OTHER}"
                )
            items += found
        # In the order of the file: a chunk that two runs need is read twice, but from the page cache.
        with self._readable():
            self._files.read_data(LoadPlan(items), planner).wait()

    def whole(self, key: str) -> torch.Tensor:
        """A tensor in full, flat, in its own dtype: for tools that work on one parameter at a time."""
        into = torch.empty(self.numel(key), dtype=self.dtype(key))
        self.read([Wanted(key, 0, into)])
        return into

    def _readable(self) -> _Readable:
        return _Readable(self._folder)


_OTHER = "Load another checkpoint."


class _Readable:
    """Whatever DCP and pickle raise over a damaged file becomes one error that names the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            raise CheckpointError(
                f"`{self._folder}`: must be readable; got {said(error)} {_OTHER}"
            ) from error


class _Filling(LoadPlanner):
    """DCP's planner of a load that already knows where everything goes."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._into = {(want.key, want.start): want.into for want in wanted}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index, low = read_item.dest_index, read_item.dest_offsets[0]
        if index.offset is None:
            raise AssertionError(f"{index.fqn} has no place")
        return self._into[index.fqn, index.offset[0]][low : low + read_item.lengths[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is in its place already."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.storage_index.fqn} is no tensor")

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def create_local_plan(self) -> LoadPlan:
        raise AssertionError("the plan is made by `Reader.read`")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan
