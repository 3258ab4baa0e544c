"""Lay out a folder of safetensors files, and write slices of parameters to their places.

The layout follows from names, shapes and dtypes, so every rank knows the place of its slices. One process
creates the files at full size, so that a full disk is found early; then any number of processes write.

Invariant: equal tensors in an equal order give equal files; each element is written once and rounded once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, NonFiniteError, ZerodriftError
from zerodrift.weights.boxes import Box, BoxAxis, Layout, Shape, within

INDEX = "model.safetensors.index.json"
SHARD_SIZE = "5GB"
CHUNK = 1 << 20
"""Number of elements that are converted at a time."""
SHORT = 4096
"""Runs of fewer bytes are copied through a memory map, instead of one system call each."""
_NOTE = "__metadata__"


@dataclass(frozen=True, slots=True)
class SavedPart:
    """Elements of a parameter in a tensor of a file. The box's target is the parameter."""

    parameter: str
    box: Box


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor to be written. Its parts hold each element once; codes and scales have no parts."""

    name: str
    shape: Shape
    dtype: DType
    parts: tuple[SavedPart, ...]

    @staticmethod
    def of(name: str, shape: Shape, dtype: DType) -> SavedTensor:
        """Return the tensor of a parameter that is stored as it is."""
        parts = tuple(SavedPart(name, box) for box in Layout.of(0, shape).boxes())
        return SavedTensor(name, shape, dtype, parts)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.size


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One file: its tensors in the order of their bytes, and the first byte of each."""

    name: str
    tensors: tuple[SavedTensor, ...]
    header: bytes
    starts: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def pack(tensors: Sequence[SavedTensor], shard_size: int) -> tuple[TensorFile, ...]:
    """Divide tensors into files of at most `shard_size` bytes; a larger tensor has a file of its own.

    Files are cut and named as huggingface_hub does.
    """
    for tensor in tensors:
        _check_name(tensor.name)
    groups: list[list[SavedTensor]] = []
    last: list[SavedTensor] = []
    used = 0
    for tensor in tensors:
        if tensor.nbytes > shard_size:
            groups.append([tensor])
            continue
        if used + tensor.nbytes > shard_size:
            groups.append(last)
            last, used = [], 0
        last.append(tensor)
        used += tensor.nbytes
    if last or not groups:
        groups.append(last)
    if len(groups) == 1:
        return (_file("model.safetensors", groups[0]),)
    names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    return tuple(_file(name, group) for name, group in zip(names, groups, strict=True))


def _check_name(name: str) -> None:
    try:
        name.encode()
        got = f"{name!r}, which is the format's own" if name == _NOTE else ""
    except UnicodeEncodeError:
        got = ascii(name)
    if got:
        must = f"must be a name that safetensors can hold, in UTF-8 and not {_NOTE!r}"
        raise ConfigError(ascii(name)[1:-1], must, got=got, do="Rename the parameter.")


def _file(name: str, tensors: Iterable[SavedTensor]) -> TensorFile:
    # Wide dtypes first, so that every tensor starts at a multiple of its element.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.size)
    entries: dict[str, object] = {_NOTE: {"format": "pt"}}
    offsets, end = [], 0
    for tensor in ordered:
        begin, end = end, end + tensor.nbytes
        offsets.append(begin)
        place = {"shape": list(tensor.shape), "data_offsets": [begin, end]}
        entries[tensor.name] = {"dtype": tensor.dtype.safetensors, **place}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return TensorFile(name, tuple(ordered), header, tuple(len(header) + begin for begin in offsets))


def index_text(files: Sequence[TensorFile]) -> str:
    tensors = [tensor for file in files for tensor in file.tensors]
    total = {
        "total_parameters": sum(tensor.numel for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
    }
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    return json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_in_bytes(size: int | str, where: str = "max_shard_size") -> int:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ConfigError(where, "must be a number of bytes or a size such as 5GB or 500MB", got=repr(size))
    return int(float(match[1]) * unit)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor: the number of its file, and its first byte."""

    file: int
    start: int
    tensor: SavedTensor


class SafetensorsWriter:
    """The files of one folder, written by parameter."""

    def __init__(
        self, folder: Path, files: Sequence[TensorFile], progress: Callable[[int], None] = lambda count: None
    ) -> None:
        """`progress` is called with the number of bytes after each write."""
        self._folder, self._files, self._progress = folder, files, progress
        self._open: dict[int, int] = {}
        """Number of a file -> its descriptor."""
        self._places: dict[str, _Place] = {}
        self._parts: dict[str, list[tuple[_Place, Box]]] = {}
        """Name of a parameter -> the tensors that hold its elements."""
        for number, file in enumerate(files):
            for tensor, start in zip(file.tensors, file.starts, strict=True):
                self._places[tensor.name] = place = _Place(number, start, tensor)
                for part in tensor.parts:
                    self._parts.setdefault(part.parameter, []).append((place, part.box))

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, folder: Path, files: Sequence[TensorFile], progress: Callable[[int], None] = lambda count: None
    ) -> Iterator[SafetensorsWriter]:
        """Yield a writer. Its files are flushed to the disk at the end, and closed in any case."""
        writer = cls(folder, files, progress)
        try:
            yield writer
            for descriptor in writer._open.values():
                os.fsync(descriptor)
        finally:
            for descriptor in writer._open.values():
                os.close(descriptor)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def dtype(self, name: str) -> DType | None:
        """Return the dtype that a parameter is written in; None if its parts differ."""
        dtypes = {place.tensor.dtype for place, _ in self._parts[name]}
        return dtypes.pop() if len(dtypes) == 1 else None

    def create(self) -> None:
        """Create every file at its full size, and the index of several. One process calls this."""
        if len(self._files) > 1:
            (self._folder / INDEX).write_text(index_text(self._files), encoding="utf-8")
        for file in self._files:
            with (self._folder / file.name).open("wb") as out:
                out.write(file.header)
                out.flush()
                if file.size:
                    os.posix_fallocate(out.fileno(), 0, file.size)

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write the elements of a parameter from `start` on, in row-major order."""
        for place, whole in self._parts[name]:
            for box in within((whole,), start, start + values.numel()):
                self._write(place, box, box.of_target(values, start), name)

    def put(self, tensor: str, first: int, values: torch.Tensor) -> None:
        """Write elements of a tensor of the files from `first` on, in its own dtype."""
        place = self._places[tensor]
        self._put(place, first * place.tensor.dtype.size, values.cpu().contiguous())

    def _write(self, place: _Place, box: Box, values: torch.Tensor, name: str) -> None:
        dtype = place.tensor.dtype
        run, outer = _runs(box)
        if outer and run * dtype.size < SHORT:
            self._scatter(place, box, values, name)
            return
        for index in itertools.product(*(range(axis.size) for axis in outer)):
            row = values[index].reshape(-1)
            at = box.origin + sum(n * axis.source for n, axis in zip(index, outer, strict=True))
            for low in range(0, run, CHUNK):
                self._put(place, (at + low) * dtype.size, _converted(row[low : low + CHUNK], dtype, name))

    def _put(self, place: _Place, offset: int, values: torch.Tensor) -> None:
        data = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
        at = place.start + offset
        while data:
            count = os.pwrite(self._descriptor(place.file), data, at)
            if count == 0:
                must = f"must take {len(data)} bytes"
                raise ZerodriftError(self._files[place.file].name, must, got="none taken")
            data, at = data[count:], at + count
            self._progress(count)

    def _scatter(self, place: _Place, box: Box, values: torch.Tensor, name: str) -> None:
        """Write elements that lie far apart in the file."""
        data = _converted(values.contiguous(), place.tensor.dtype, name)
        page = place.start - place.start % mmap.ALLOCATIONGRANULARITY
        length = place.start + place.tensor.nbytes - page
        with mmap.mmap(self._descriptor(place.file), length, offset=page) as mapped:
            count, start = place.tensor.numel, place.start - page
            flat = torch.frombuffer(mapped, dtype=data.dtype, count=count, offset=start)
            box.of_source(flat).copy_(data)
            del flat  # a mapping cannot be closed while a tensor views it
        self._progress(data.nbytes)

    def _descriptor(self, number: int) -> int:
        if number not in self._open:
            self._open[number] = os.open(self._folder / self._files[number].name, os.O_RDWR)
        return self._open[number]


def _runs(box: Box) -> tuple[int, tuple[BoxAxis, ...]]:
    """Return (elements that follow each other in the file, axes around them)."""
    run, inner = 1, len(box.axes)
    while inner and box.axes[inner - 1].source == run:
        run *= box.axes[inner - 1].size
        inner -= 1
    return run, box.axes[:inner]


def _converted(values: torch.Tensor, dtype: DType, name: str) -> torch.Tensor:
    """Round to the dtype of the file, on the host and contiguous."""
    out = values.detach().to(dtype.torch)
    if dtype is DType.FP16 and out.dtype is not values.dtype:
        lost = out.isinf() & values.isfinite()
        if bool(lost.any()):
            got = f"{values.abs().max().item():g}"
            do = "Export as bf16 or fp32."
            raise NonFiniteError(name, "must fit into fp16, which ends at 65504", got=got, do=do)
    return out.cpu().contiguous()
