"""Read JSON objects (configs, indexes, headers of safetensors files), or report where the mistake is.

Only the header of a safetensors file is read, never a tensor. Every offset is checked against the file's
size, so later readers can trust it. `model/safetensors.py` chooses the files of a checkpoint.

Invariant: every key of a returned object occurs once in its text. The tensors of one file tile its data
region: no gap, no overlap, nothing beyond the end.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from zerodrift.dtypes import DType, from_safetensors
from zerodrift.errors import Problems, first_of
from zerodrift.files import opened

NAMES_SHOWN = 50
"""Most names that one message lists; further names are counted."""


def read(path: Path, problems: Problems) -> dict[str, Any] | None:
    """Read the JSON object in a file."""
    try:
        with opened(path) as file:
            data = file.read()
    except OSError as error:
        problems.add(str(path), "must be a file that can be read", got=error.strerror or str(error))
        return None
    return parse(data, str(path), problems)


def parse(data: bytes, where: str, problems: Problems) -> dict[str, Any] | None:
    """Parse the JSON object in `data`; messages call the data `where`."""
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated.extend(key for key, count in counts.items() if count > 1)
        return built

    must, got = "must be JSON", ""
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        got = f"{error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError as error:
        must, got = "must be JSON in UTF-8", f"the byte {data[error.start]:#04x} at {error.start}"
    except (ValueError, RecursionError) as error:
        must, got = "must be JSON of ordinary depth and numbers", str(error)
    if got:
        problems.add(where, must, got=got)
        return None
    if not isinstance(document, dict):
        problems.add(where, "must be a JSON object", got=type(document).__name__)
        return None
    if repeated:
        problems.add(where, "must name every key once", got=f"{listed(repeated)} more than once")
        return None
    return document


def listed(names: list[str]) -> str:
    """List names for a message: the first fifty in backticks, then a count."""
    return first_of([f"`{name}`" for name in names], NAMES_SHOWN)


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


def read_header(path: Path, problems: Problems) -> tuple[frozenset[str], list[StoredTensor]] | None:
    """Read all names in a file's header, and the tensors that are valid; None if it is unreadable."""
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
    must, got, do = "", "", _AGAIN
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES:
                must, got = "must open with a header length of 8 bytes", f"{size} bytes"
            elif length > HEADER_LIMIT:
                must = f"must be a safetensors file, with a header of at most {HEADER_LIMIT:,} bytes"
                got, do = f"a header length of {length:,}", ""
                if length == int.from_bytes(b"version ", "little"):
                    got, do = "a pointer of Git LFS", "Run `git lfs pull` where it was cloned."
            elif length > size - LENGTH_BYTES:
                must, got = f"must hold its header of {length:,} bytes", f"{size:,} bytes"
            else:
                header = parse(file.read(length), f"{where}, header", problems)
                return None if header is None else (header, LENGTH_BYTES + length, size)
    except OSError as error:
        must, got, do = "must be a file that can be read", error.strerror or str(error), ""
    problems.add(where, must, got=got, do=do)
    return None


_AGAIN = "It was cut short: copy or download it again."


def _tensor(
    name: str, entry: Any, path: Path, data_start: int, problems: Problems, unknown: dict[str, list[str]]
) -> StoredTensor | None:
    """Check one entry of a header; add a dtype that zerodrift does not have to `unknown`."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        must, got = "must have `dtype`, `shape` and `data_offsets`", shown(entry)
    elif not isinstance(text := entry["dtype"], str):
        must, got = "`dtype` must be a string", shown(text)
    elif not _counts(shape := entry["shape"]):
        must, got = "`shape` must be a list of whole numbers, 0 or more", shown(shape)
    elif not _counts(offsets := entry["data_offsets"]) or len(offsets) != 2 or offsets[0] > offsets[1]:
        must, got = "`data_offsets` must be a begin and an end that is not before it", shown(offsets)
    elif (dtype := from_safetensors(text)) is None:
        unknown.setdefault(text, []).append(name)
        return None
    elif (held := offsets[1] - offsets[0]) != math.prod(shape) * dtype.size:
        must = f"`data_offsets` must span {dtype.size} bytes for each element of {text} {shown(shape)}"
        got = f"{held:,} bytes, {offsets}"
    else:
        start, stop = (data_start + offset for offset in offsets)
        return StoredTensor(name, tuple(shape), dtype, path, start, stop)
    problems.add(f"{path}, {name}", must, got=got)
    return None


def _counts(value: Any) -> bool:
    # `type` and not `isinstance`: true and false are ints in Python.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_tiling(
    tensors: list[StoredTensor], path: Path, data_start: int, size: int, problems: Problems
) -> None:
    reached, last = data_start, "the header"
    for tensor in tensors:
        where = f"{path}, {tensor.name}"
        if tensor.start < reached:
            got = f"an overlap of {reached - tensor.start:,} bytes"
            problems.add(where, f"must begin after the bytes of `{last}`", got=got)
        elif tensor.start > reached:
            got = f"a gap of {tensor.start - reached:,} bytes"
            problems.add(where, f"must begin where the bytes of `{last}` end", got=got)
        if tensor.stop >= reached:
            reached, last = tensor.stop, tensor.name
    where = str(path)
    if reached > size:
        got = f"{size:,} bytes, which ends before the end of `{last}`"
        problems.add(where, f"must be {reached:,} bytes long, as its header says", got=got, do=_AGAIN)
    elif reached < size:
        got = f"{size - reached:,} bytes more"
        problems.add(where, f"must end with its last tensor, at byte {reached:,}", got=got)
