"""What a folder of safetensors files looks like before it is written: names, headers, the place of each byte.

Everything follows from the tensors' names, shapes and dtypes, so every rank knows the place of its own slices
and nobody has to send or collect anything. Writing them is `writer.py`'s business.

Invariant: equal tensors in an equal order give equal files; every tensor is in exactly one of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError
from zerodrift.io.safetensors.saving import Laid, Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_SIZE = "5GB"
"""Where nobody says; what the hub asks for."""


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor of a folder that is to be written."""

    laid: Laid
    dtype: DType

    @property
    def nbytes(self) -> int:
        return math.prod(self.laid.shape) * self.dtype.size


@dataclass(frozen=True, slots=True)
class File:
    """One file."""

    name: str
    tensors: tuple[Written, ...]
    """In the order of their bytes."""
    header: bytes
    """With its length, as it stands at the head of the file."""
    starts: tuple[int, ...]
    """First byte of each tensor, from the start of the file."""

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def pack(
    tensors: Sequence[Written], shard_size: int, single: str = SINGLE, note: dict[str, str] | None = None
) -> tuple[File, ...]:
    """Tensors in their order into files of at most `shard_size` bytes of data; a larger one has its own.
    Files are cut and named as huggingface_hub does."""
    _check_names(tensors)
    groups: list[list[Written]] = []
    open_one: list[Written] = []
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


def _check_names(tensors: Iterable[Written]) -> None:
    """A name is a key of JSON in UTF-8, and one key is taken."""
    for tensor in tensors:
        name = tensor.laid.name
        try:
            name.encode()
            got = f"{name!r}, which is the format's own" if name == _NOTE else ""
        except UnicodeEncodeError:
            got = ascii(name)
        if got:
            raise ConfigError(
                f"`{ascii(name)[1:-1]}`: must be a name that safetensors can hold, in UTF-8 and not "
                f"{_NOTE!r}; got {got}. Rename the parameter."
            )


_NOTE = "__metadata__"


def _file(name: str, tensors: Iterable[Written], note: dict[str, str] | None) -> File:
    # Wide dtypes first, so that every tensor starts at a multiple of its element.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.size)
    entries: dict[str, object] = {_NOTE: {"format": "pt", **(note or {})}}
    offsets, end = [], 0
    for tensor in ordered:
        begin, end = end, end + tensor.nbytes
        offsets.append(begin)
        entries[tensor.laid.name] = {
            "dtype": tensor.dtype.safetensors,
            "shape": list(tensor.laid.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return File(name, tuple(ordered), header, tuple(len(header) + begin for begin in offsets))


def index_text(files: Sequence[File]) -> str:
    """The index of a folder with several files."""
    tensors = [tensor for file in files for tensor in file.tensors]
    total = {
        "total_parameters": sum(math.prod(tensor.laid.shape) for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
    }
    weight_map = {tensor.laid.name: file.name for file in files for tensor in file.tensors}
    return json.dumps({"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_in_bytes(size: int | str, where: str = "max_shard_size") -> int:
    """`"5GB"` or a number of bytes."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ConfigError(
            f"`{where}`: must be a number of bytes or a size such as 5GB or 500MB; got {size!r}."
        )
    return int(float(found[1]) * unit)


# --- runs and boxes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor."""

    low: Shape
    shape: Shape
    offset: int
    """Where its elements begin in the run that it is cut from."""


def boxes(start: int, stop: int, shape: Shape) -> Iterator[Box]:
    """The elements `[start, stop)` of the row-major flattening of `shape`, cut into boxes in their order.

    There are at most two per dimension, less one: a ragged head, whole rows, a ragged tail.
    """
    if start >= stop:
        return
    yield from _boxes(start, stop, shape, (), 0)


def _boxes(start: int, stop: int, shape: Shape, prefix: Shape, offset: int) -> Iterator[Box]:
    if not shape:
        yield Box(prefix, (1,) * len(prefix), offset)
        return
    inner = math.prod(shape[1:])
    head, tail = -(-start // inner), stop // inner
    if head > tail:  # within one row
        yield from _row(start, stop, shape, prefix, offset)
        return
    if start < head * inner:
        yield from _row(start, head * inner, shape, prefix, offset)
    if head < tail:
        low = (*prefix, head, *(0 for _ in shape[1:]))
        sizes = (*(1 for _ in prefix), tail - head, *shape[1:])
        yield Box(low, sizes, offset + head * inner - start)
    if tail * inner < stop:
        yield from _row(tail * inner, stop, shape, prefix, offset + tail * inner - start)


def _row(start: int, stop: int, shape: Shape, prefix: Shape, offset: int) -> Iterator[Box]:
    """A run within one row of the first dimension."""
    inner = math.prod(shape[1:])
    row = start // inner
    yield from _boxes(start - row * inner, stop - row * inner, shape[1:], (*prefix, row), offset)


def overlap(box: Box, low: Shape, shape: Shape) -> tuple[Shape, Shape] | None:
    """(first index, elements) of what a box shares with another one; None for nothing."""
    first = tuple(max(a, b) for a, b in zip(box.low, low, strict=True))
    ends = [min(a + n, b + m) for a, n, b, m in zip(box.low, box.shape, low, shape, strict=True)]
    sizes = tuple(end - begin for begin, end in zip(first, ends, strict=True))
    return None if any(size <= 0 for size in sizes) else (first, sizes)
