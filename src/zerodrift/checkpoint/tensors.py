"""Write and read flat pieces of parameters in files of `torch.distributed.checkpoint` (DCP).

A weight and each moment is one DCP tensor of one dimension, `weights.<name>` and `moments.<key>.<name>`, cut
into chunks. A weight in a narrow format is saved as the bytes of its blocks, each its codes and then its
scale. DCP's own writer would keep all tensors of a file until it is closed (torch 2.13), so the same bytes
are written here, one chunk at a time. A reader opens the descriptions of the ranks that wrote its elements.

Invariant: neither direction holds more than one chunk and its serialized bytes, and each element is read from
exactly one chunk.

[Note: DCP] `_StorageInfo`, in `write_index`, is private in torch. Tested on torch 2.13 to 2.15.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import io
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from zerodrift.checkpoint import manifest
from zerodrift.checkpoint.files import open_own, short
from zerodrift.dtypes import BLOCK, DType, Format
from zerodrift.errors import CheckpointError, said
from zerodrift.kernels import PackedRun, narrow
from zerodrift.plan import Plan, Row, rank_of

CHUNK = 8 << 20
INDEX = ".metadata"
FEW = 64
"""Most ranks for which a save writes DCP's index, which costs rank 0 30 us and 2.6 KB per chunk."""
OTHER = "Load another checkpoint."

weight_key = "weights.{}".format
moment_key = "moments.{}.{}".format
feedback_key = "feedback.{}.{}".format


@dataclass(frozen=True, slots=True)
class Item:
    """A run of elements of one tensor of `numel` elements."""

    key: str
    numel: int
    start: int
    values: torch.Tensor

    def copied(self) -> Item:
        """Copy the values to host memory, to be written while training goes on."""
        return replace(self, values=self.values.to("cpu", copy=True))


def write_items(path: Path, items: Iterable[Item]) -> tuple[manifest.File, list[manifest.Chunk]]:
    chunks, start, sha256 = [], 0, hashlib.sha256()
    with path.open("wb") as stream:
        for item in items:
            for low in range(0, item.values.numel(), CHUNK):
                values = item.values[low : low + CHUNK].detach().cpu()
                if values.untyped_storage().nbytes() != values.nbytes:
                    values = values.clone()  # torch.save writes the whole storage
                saved, dtype = io.BytesIO(), str(values.dtype).removeprefix("torch.")
                torch.save(values, saved)
                length = stream.write(saved.getbuffer())
                sha256.update(saved.getbuffer())
                run = (item.key, item.numel, item.start + low, values.numel(), dtype)
                chunks.append(manifest.Chunk(*run, path.name, start, length))
                start += length
        stream.flush()
        os.fsync(stream.fileno())
    return manifest.File(path.name, start, sha256.hexdigest()), chunks


def write_index(folder: Path, chunks: Iterable[manifest.Chunk]) -> manifest.File:
    """Write DCP's own `.metadata` over the files of all ranks, for DCP's reader."""
    # Imported here: it takes longer than importing zerodrift, and only rank 0 writes.
    from torch.distributed.checkpoint import metadata as meta
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    tensors: dict[str, meta.TensorStorageMetadata] = {}
    results = []
    for chunk in chunks:
        tensor = tensors.get(chunk.key)
        if tensor is None:
            properties = meta.TensorProperties(dtype=getattr(torch, chunk.dtype))
            tensor = meta.TensorStorageMetadata(properties, torch.Size([chunk.numel]), [])
            tensors[chunk.key] = tensor
        offset = torch.Size([chunk.start])
        tensor.chunks.append(meta.ChunkStorageMetadata(offset, torch.Size([chunk.count])))
        place = _StorageInfo(chunk.file, chunk.offset, chunk.length)
        results.append(WriteResult(meta.MetadataIndex(chunk.key, offset), chunk.length, place))
    FileSystemWriter(folder).finish(meta.Metadata(tensors), [results])  # type: ignore[arg-type]
    return manifest.measured(folder / INDEX)


# --- which ranks wrote what -------------------------------------------------------------------------------


def holders(plan: Plan, name: str, start: int, stop: int) -> Iterator[int]:
    """Yield the world ranks that wrote elements `[start, stop)` of a parameter, by the plan of the save."""
    row = plan.row(name)
    if row is None or not row.numel:
        return
    stage = rank_of(plan.policy.pipeline, plan.mesh, plan.units[row.unit].stage)
    ranks = _dtensor_ranks if plan.policy.backend == "fsdp2" else _segment_ranks
    for rank in ranks(plan, row, start, stop):
        yield stage * plan.mesh.data + rank


def _dtensor_ranks(plan: Plan, row: Row, start: int, stop: int) -> Iterator[int]:
    """Yield the ranks for FSDP2: `fully_shard` cuts the first dimension, and each replica of a shard may have
    written a part of it."""
    mesh = plan.mesh
    size = max(1, -(-row.shape[0] // mesh.shard) * math.prod(row.shape[1:]))
    for index in _places(start, stop, size, mesh.shard):
        yield from range(index, mesh.data, mesh.shard)


def _segment_ranks(plan: Plan, row: Row, start: int, stop: int) -> Iterator[int]:
    """Yield the ranks for flat segments, which are cut into equal slices. The replicas of a slice divide it
    into whole blocks."""
    mesh, segment = plan.mesh, plan.segments[row.segment]
    slices, update = plan.slices(segment), segment.columns.update
    is_sliced = bool(segment.columns.storage.axis if update is None else update.axis)
    size = max(1, segment.padded // slices if is_sliced else segment.padded)
    copies = mesh.replicate * (1 if is_sliced else slices)
    blocks = size // BLOCK

    def cut(copy: int) -> int:
        return BLOCK * (blocks * copy // copies)

    for part in _places(start, stop, row.numel, row.parts):  # parts of experts are on ranks of their own
        low, high = (row.offset + min(max(at - part * row.numel, 0), row.numel) for at in (start, stop))
        for index in _places(low, high, size, slices if is_sliced else 1):
            first, last = (min(max(at - index * size, 0), size) for at in (low, high))
            lowest = bisect.bisect_right(range(copies), first, key=cut) - 1
            for copy in range(lowest, bisect.bisect_left(range(copies), last, key=cut)):
                replica, place = (copy, index) if is_sliced else divmod(copy, slices)
                if cut(copy) < cut(copy + 1):
                    yield replica * mesh.shard + (place * mesh.expert + part if row.parts > 1 else place)


def _places(start: int, stop: int, size: int, count: int) -> range:
    """Return which of `count` neighbours of one size hold elements `[start, stop)`."""
    return range(start // size, min((stop - 1) // size + 1, count))


class CheckpointReader:
    """Reads any elements of one checkpoint's tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = manifest.read_manifest(folder).of_ranks
        self._chunks: dict[int, dict[str, list[manifest.Chunk]]] = {}
        """Rank -> key -> chunks, for the descriptions that were opened."""

    def check(self, entry: manifest.SavedParameter, start: int = 0, stop: int | None = None) -> None:
        """Raise unless the files hold a run of elements of a parameter and of its moments."""
        numel, form = math.prod(entry.shape), DType(entry.dtype).format
        stop = numel if stop is None else stop
        runs = [(moment_key(key, entry.name), start, stop, numel) for key in entry.moments]
        if form is not None:
            start, stop = _records(form, start, stop)
            numel = form.blocks(entry.shape) * form.record_bytes
        for key, low, high, held in (*runs, (weight_key(entry.name), start, stop, numel)):
            for chunk in self.find(key, low, high):
                if chunk.numel != held:
                    must = f"must hold {held:,} elements of {key!r}"
                    raise CheckpointError(self._folder, must, got=f"{chunk.numel:,}", do=OTHER)

    def read(self, wanted: Iterable[tuple[str, int, torch.Tensor]]) -> None:
        """Copy runs of elements, each a key and a first element, to flat tensors of any dtype and device."""
        parts = [
            (chunk, start, into)
            for key, start, into in wanted
            for chunk in self.find(key, start, start + into.numel())
        ]
        parts.sort(key=lambda part: (part[0].file, part[0].offset))
        for chunk, group in itertools.groupby(parts, key=lambda part: part[0]):
            values = self._load(chunk)
            for _, start, into in group:
                low, high = max(start, chunk.start), min(start + into.numel(), chunk.start + chunk.count)
                into[low - start : high - start].copy_(values[low - chunk.start : high - chunk.start])
            del values

    def read_weights(self, wanted: Sequence[tuple[manifest.SavedParameter, int, torch.Tensor]]) -> None:
        coded = {entry.name: form for entry, *_ in wanted if (form := DType(entry.dtype).format)}
        self.read((weight_key(e.name), start, into) for e, start, into in wanted if e.name not in coded)
        for entry, start, into in (want for want in wanted if want[0].name in coded):
            before = start % coded[entry.name].run
            run = self.read_packed(entry, start - before, before + into.numel())
            into.copy_(run.values()[before : before + into.numel()])

    def read_packed(self, entry: manifest.SavedParameter, start: int, numel: int) -> PackedRun:
        """Return the blocks that hold `numel` elements of a narrow format; `start` must begin a block."""
        dtype = DType(entry.dtype)
        form = narrow.form_of(dtype)
        low, high = _records(form, start, start + numel)
        records = torch.empty(high - low, dtype=torch.uint8)
        self.read([(weight_key(entry.name), low, records)])
        run = PackedRun.empty(dtype, (high - low) // form.record_bytes * form.run)
        run.set_records(0, records)
        return run

    def find(self, key: str, start: int, stop: int) -> Sequence[manifest.Chunk]:
        """Return the chunks with elements `[start, stop)` of a tensor, in order."""
        if start >= stop:
            return ()
        chunks: list[manifest.Chunk] = []
        for ranks in (self._likely_ranks(key, start, stop), range(self._files.ranks)):
            chunks = self._select(ranks, key, start, stop)
            if _is_whole(chunks, start, stop):
                return chunks
        must = f"must hold each element of {short(repr(key))} once"
        got = "gaps or overlaps" if chunks else "no such tensor"
        raise CheckpointError(short(self._folder), must, got=got, do=OTHER)

    def _select(self, ranks: Iterable[int], key: str, start: int, stop: int) -> list[manifest.Chunk]:
        chunks = [chunk for rank in ranks for chunk in self._described(rank).get(key, ())]
        chunks = [chunk for chunk in chunks if chunk.start < stop and start < chunk.start + chunk.count]
        return sorted(chunks, key=lambda chunk: chunk.start)

    def _likely_ranks(self, key: str, start: int, stop: int) -> Iterable[int]:
        """Return the ranks that wrote these elements, if the plan of the save is known."""
        if self.plan is None:
            return ()
        kind, _, name = key.partition(".")
        name = name if kind == "weights" else name.partition(".")[2]
        try:
            row = self.plan.row(name) if kind == "weights" else None
            form = None if row is None else row.columns.storage.dtype.format
            if form is not None:
                start, stop = (at // form.record_bytes * form.run for at in (start, stop))
            ranks = holders(self.plan, name, start, stop)
            return sorted({rank for rank in ranks if 0 <= rank < self._files.ranks})
        except manifest.UNREADABLE:
            return ()

    @cached_property
    def plan(self) -> Plan | None:
        """The plan of the save; None if there is none, or one of another version."""
        with contextlib.suppress(CheckpointError):
            return manifest.read_plan(self._folder)
        return None

    def _described(self, rank: int) -> dict[str, list[manifest.Chunk]]:
        if rank not in self._chunks:
            by_key = self._chunks[rank] = defaultdict(list)
            for chunk in manifest.read_description(self._folder, self._files, rank)[0].chunks:
                by_key[chunk.key].append(chunk)
        return self._chunks[rank]

    def _load(self, chunk: manifest.Chunk) -> torch.Tensor:
        try:
            with open_own(self._folder, chunk.file) as stream:
                stream.seek(chunk.offset)
                data = io.BytesIO(stream.read(chunk.length))
            values = torch.load(data, map_location="cpu", weights_only=True)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(self._folder, "must be readable", got=said(error), do=OTHER) from error
        wanted = (f"torch.{chunk.dtype}", (chunk.count,))
        if not isinstance(values, torch.Tensor) or (str(values.dtype), values.shape) != wanted:
            what = f"{chunk.count:,} elements of {chunk.dtype} of {chunk.key!r}"
            must = f"must hold {what} where its index says"
            raise CheckpointError(self._folder, must, got="something else", do=OTHER)
        return values


def _records(form: Format, start: int, stop: int) -> tuple[int, int]:
    """Return the bytes of the blocks that hold elements `[start, stop)`."""
    block = form.run
    return start // block * form.record_bytes, -(-stop // block) * form.record_bytes


def _is_whole(chunks: Sequence[manifest.Chunk], start: int, stop: int) -> bool:
    """Return whether chunks hold each element of `[start, stop)` once."""
    reached = start
    for number, chunk in enumerate(chunks):
        if chunk.start != reached and (number or chunk.start > start):
            return False
        reached = chunk.start + chunk.count
    return reached >= stop
