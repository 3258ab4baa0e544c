"""What a folder of safetensors files looks like before it is written: names, headers, the place of each byte.

Everything follows from the tensors' names, shapes and dtypes, so every rank knows the place of its own slices
and nobody has to send or collect anything. Writing them is `writer.py`'s business.

Invariant: equal tensors in an equal order give equal files; every tensor is in exactly one of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError
from zerodrift.io.safetensors.boxes import Box, Layout, Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_SIZE = "5GB"
"""Where nobody says; what the hub asks for."""


@dataclass(frozen=True, slots=True)
class SavedPart:
    """Elements of a parameter in a tensor of a file."""

    parameter: str
    box: Box
    """The target is the parameter, the source the tensor, as in reading."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that is to be written."""

    name: str
    shape: Shape
    dtype: DType
    parts: tuple[SavedPart, ...]
    """Each element once; none of a tensor without elements."""

    @staticmethod
    def of(name: str, shape: Shape, dtype: DType) -> SavedTensor:
        """A parameter as it is."""
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
    """One file."""

    name: str
    tensors: tuple[SavedTensor, ...]
    """In the order of their bytes."""
    header: bytes
    """With its length, as it stands at the head of the file."""
    starts: tuple[int, ...]
    """First byte of each tensor, from the start of the file."""

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def pack(
    tensors: Sequence[SavedTensor], shard_size: int, single: str = SINGLE, note: dict[str, str] | None = None
) -> tuple[TensorFile, ...]:
    """Tensors in their order into files of at most `shard_size` bytes of data; a larger one has its own.
    Files are cut and named as huggingface_hub does."""
    _check_names(tensors)
    groups: list[list[SavedTensor]] = []
    open_one: list[SavedTensor] = []
    used = 0
    for tensor in tensors:
        if tensor.nbytes > shard_size:
            groups.append([tensor])
            continue
        if used + tensor.nbytes > shard_size:
            groups.append(open_one)
            open_one, used = [], 0
        open_one.append(tensor)
        used += tensor.nbytes
    if open_one or not groups:
        groups.append(open_one)
    if len(groups) == 1:
        return (_file(single, groups[0], note),)
    stem = single.removesuffix(".safetensors")
    names = [f"{stem}-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    return tuple(_file(name, group, note) for name, group in zip(names, groups, strict=True))


def _check_names(tensors: Iterable[SavedTensor]) -> None:
    """A name is a key of JSON in UTF-8, and one key is taken."""
    for tensor in tensors:
        name = tensor.name
        try:
            name.encode()
            got = f"{name!r}, which is the format's own" if name == _NOTE else ""
        except UnicodeEncodeError:
            got = ascii(name)
        if got:
            raise ConfigError(
                ascii(name)[1:-1],
                f"must be a name that safetensors can hold, in UTF-8 and not {_NOTE!r}",
                got=got,
                do="Rename the parameter.",
            )


_NOTE = "__metadata__"


def _file(name: str, tensors: Iterable[SavedTensor], note: dict[str, str] | None) -> TensorFile:
    # Wide dtypes first, so that every tensor starts at a multiple of its element.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.size)
    entries: dict[str, object] = {_NOTE: {"format": "pt", **(note or {})}}
    offsets, end = [], 0
    for tensor in ordered:
        begin, end = end, end + tensor.nbytes
        offsets.append(begin)
        entries[tensor.name] = {
            "dtype": tensor.dtype.safetensors,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return TensorFile(name, tuple(ordered), header, tuple(len(header) + begin for begin in offsets))


def index_text(files: Sequence[TensorFile]) -> str:
    """The index of a folder with several files."""
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
    """`"5GB"` or a number of bytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ConfigError(where, "must be a number of bytes or a size such as 5GB or 500MB", got=repr(size))
    return int(float(match[1]) * unit)
