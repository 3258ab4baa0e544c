"""Read the header of one safetensors file: the names, shapes, dtypes and byte ranges of its tensors.

Only the header is read, never a tensor. Every offset is checked against the file's size, so later readers can
trust it. `model/safetensors.py` chooses the files of a checkpoint.

Invariant: the tensors of one file tile its data region: no gap, no overlap, nothing beyond the end.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from zerodrift.dtypes import DType, from_safetensors
from zerodrift.errors import Problems
from zerodrift.files import opened
from zerodrift.model.document import listed, parse

LENGTH_BYTES = 8
"""Size of the header's length at the start of a file, little-endian and unsigned."""
HEADER_LIMIT = 100_000_000
"""Most bytes of a header, by the format. A greater length is garbage, and nothing is allocated for it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint and the place of its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    file: Path
    start: int
    """Offset of the first byte in the file."""
    stop: int
    """One past the last byte."""


def read_header(path: Path, problems: Problems) -> tuple[frozenset[str], list[StoredTensor]] | None:
    """Read the header of one file: all names, also of refused tensors, and the tensors by place.

    Return None if the header cannot be read at all.
    """
    header = _read(path, problems)
    if header is None:
        return None
    entries, data_start, size = header
    entries.pop("__metadata__", None)
    tensors: list[StoredTensor] = []
    unknown: dict[str, list[str]] = {}
    for name, entry in entries.items():
        tensor = _tensor(name, entry, path, data_start, problems, unknown)
        if tensor is not None:
            tensors.append(tensor)
    for text, names in unknown.items():
        problems.add(str(path), "must hold dtypes that zerodrift knows", got=f"{text} in {listed(names)}")
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    # A tensor that was refused above leaves a gap that is not the file's fault.
    if len(tensors) == len(entries):
        _check_tiling(tensors, path, data_start, size, problems)
    return frozenset(entries), tensors


def _read(path: Path, problems: Problems) -> tuple[dict[str, Any], int, int] | None:
    """Return the header as a dict, the offset of the data, and the size of the file."""
    where = str(path)
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES:
                must = "must open with a header length of 8 bytes"
                problems.add(where, must, got=f"{size} bytes", do=_AGAIN)
                return None
            if length > HEADER_LIMIT:
                must = f"must be a safetensors file, with a header of at most {HEADER_LIMIT:,} bytes"
                problems.add(where, must, got=f"a header length of {length:,}")
                return None
            if length > size - LENGTH_BYTES:
                must = f"must hold its header of {length:,} bytes"
                problems.add(where, must, got=f"{size:,} bytes", do=_AGAIN)
                return None
            data = file.read(length)
    except OSError as error:
        problems.add(where, "must be a file that can be read", got=error.strerror or str(error))
        return None
    header = parse(data, f"{where}, header", problems)
    return None if header is None else (header, LENGTH_BYTES + length, size)


_AGAIN = "It was cut short: copy or download it again."


def _tensor(
    name: str, entry: Any, path: Path, data_start: int, problems: Problems, unknown: dict[str, list[str]]
) -> StoredTensor | None:
    """Check one entry of a header; add a dtype that zerodrift does not have to `unknown`."""
    where = f"{path}, {name}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        problems.add(where, "must have `dtype`, `shape` and `data_offsets`", got=shown(entry))
        return None
    text, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(text, str):
        problems.add(where, "`dtype` must be a string", got=shown(text))
        return None
    if not _counts(shape):
        problems.add(where, "`shape` must be a list of whole numbers, 0 or more", got=shown(shape))
        return None
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        must = "`data_offsets` must be a begin and an end that is not before it"
        problems.add(where, must, got=shown(offsets))
        return None
    dtype = from_safetensors(text)
    if dtype is None:
        unknown.setdefault(text, []).append(name)
        return None
    begin, end = offsets
    needed = math.prod(shape) * dtype.size
    if end - begin != needed:
        must = f"`data_offsets` must span {dtype.size} bytes for each element of {text} {shown(shape)}"
        problems.add(where, must, got=f"{end - begin:,} bytes, {offsets}")
        return None
    return StoredTensor(name, tuple(shape), dtype, path, data_start + begin, data_start + end)


def _counts(value: Any) -> bool:
    # `type` and not `isinstance`: true and false are ints in Python.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_tiling(
    tensors: list[StoredTensor], path: Path, data_start: int, size: int, problems: Problems
) -> None:
    reached, last = data_start, "the header"
    for tensor in tensors:
        if tensor.start < reached:
            must = f"must begin after the bytes of `{last}`"
            got = f"an overlap of {reached - tensor.start:,} bytes"
            problems.add(f"{path}, {tensor.name}", must, got=got)
        elif tensor.start > reached:
            must = f"must begin where the bytes of `{last}` end"
            problems.add(f"{path}, {tensor.name}", must, got=f"a gap of {tensor.start - reached:,} bytes")
        if tensor.stop >= reached:
            reached, last = tensor.stop, tensor.name
    where = str(path)
    if reached > size:
        got = f"{size:,} bytes, which ends before the end of `{last}`"
        problems.add(where, f"must be {reached:,} bytes long, as its header says", got=got, do=_AGAIN)
    elif reached < size:
        got = f"{size - reached:,} bytes more"
        problems.add(where, f"must end with its last tensor, at byte {reached:,}", got=got)
