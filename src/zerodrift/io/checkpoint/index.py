"""The `.metadata` of `torch.distributed.checkpoint` (DCP): where each chunk of all ranks' tensors lies.

torch writes it, so that torch's own reader finds it. One rank writes an entry for each chunk, so there is one
for few ranks alone. Here it is read of checkpoints of format 1, which have no descriptions: it is a pickle,
read with stand-ins for the few classes that it names, each of which keeps what it is given and does nothing.
Whatever else a pickle names is refused: a checkpoint may come from anybody.

Invariant: reading runs no code of a checkpoint, and a tensor of an `Index` has each element in one chunk.

[Note: DCP] What is private in torch is touched in this file alone: `_StorageInfo`, where an item lies in a
file, and the names in `_KEPT`. Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerodrift.errors import CheckpointError, said
from zerodrift.io.checkpoint.descriptions import Chunk
from zerodrift.io.checkpoint.manifest import File, measured
from zerodrift.io.paths import open_own, short

INDEX = ".metadata"
OTHER = "Load another checkpoint."
FEW = 64
"""Ranks up to which a save writes it: some 30 us and 2.6 KB of one rank's memory for each chunk."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of an index."""

    numel: int
    chunks: tuple[Chunk, ...]
    """By their first element."""


Index = Mapping[str, Tensor]


def write_index(folder: Path, written: Iterable[Chunk]) -> File:
    """DCP's own metadata over the files of all ranks."""
    # Here, because it takes longer to import than all of zerodrift, and one rank of all writes.
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    for chunk in written:
        tensor = tensors.get(chunk.key)
        if tensor is None:
            properties = TensorProperties(dtype=getattr(torch, chunk.dtype))
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


# --- reading ------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Index:
    """Every tensor that the metadata of a checkpoint has, or CheckpointError."""
    with open_own(folder, INDEX) as stream:
        data = stream.read()
    try:
        return _tensors(_Unpickler(io.BytesIO(data)).load().state, folder)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(short(folder / INDEX), "must be readable", got=said(error), do=OTHER) from error


class _Placeholder:
    """Stands in for a class of torch: holds what the pickle gives it."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA = "torch.distributed.checkpoint.metadata"
_KEPT = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KEPT:
            return _Placeholder
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise CheckpointError(
            INDEX,
            "must name the classes of torch's metadata alone",
            got=f"`{short(f'{module}.{name}')}`, whose code would run",
            do="Nothing was run, and nothing was loaded. Do not read this checkpoint with other tools.",
        )


def _tensors(metadata: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    places = {
        (key.state["fqn"], _only(key.state["offset"])): info.state
        for key, info in metadata["storage_data"].items()
        if key.state.get("offset") is not None
    }
    tensors = {}
    for name, kept in metadata["state_dict_metadata"].items():
        if "chunks" not in kept.state:
            continue  # bytes, of somebody else
        dtype = str(kept.state["properties"].state[0]).removeprefix("torch.")
        numel = _only(kept.state["size"])
        chunks = []
        for chunk in kept.state["chunks"]:
            start, count = _only(chunk.state["offsets"]), _only(chunk.state["sizes"])
            place = places[name, start]
            if place.get("transform_descriptors"):
                raise CheckpointError(
                    short(folder),
                    f"must hold {short(repr(name))} as it is",
                    got="a transformed one",
                    do=OTHER,
                )
            file, offset, length = str(place["relative_path"]), int(place["offset"]), int(place["length"])
            chunks.append(Chunk(str(name), numel, start, count, dtype, file, offset, length))
        chunks.sort(key=lambda chunk: chunk.start)
        ends = [0, *(chunk.start + chunk.count for chunk in chunks)]
        if any(end != chunk.start or chunk.count < 0 for end, chunk in zip(ends, chunks, strict=False)) or (
            ends[-1] != numel
        ):
            must = f"must hold each element of {short(repr(name))} once"
            raise CheckpointError(short(folder), must, got="gaps or overlaps", do=OTHER)
        tensors[str(name)] = Tensor(numel, tuple(chunks))
    return tensors


def _only(size: Any) -> int:
    """The one dimension of a size."""
    ((number,),) = size.values
    return int(number)
