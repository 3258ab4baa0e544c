"""Describe the micro-batches of a step, which ranks of a pipeline compare before the first message.

Every rank is given the same ones. A description has shapes, which lay out memory for what travels, and a
checksum of all values: the first stage reads tokens, the last one labels, and ranks with different data would
train on pairs that are none.

Invariant: two ranks with equal descriptions would compute the same from their micro-batches, up to objects
that are neither containers, tensors, numbers nor text.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerodrift.engine.executor import numbers_of, wrong_number
from zerodrift.engine.nested import tensors_in
from zerodrift.errors import Problem

Signature = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class BatchDescription:
    """The micro-batches of one rank."""

    problem: Problem | None
    shapes: tuple[Signature, ...]
    """Signature of the first micro-batch, like which all others are; empty without one."""
    weights: tuple[float, ...]
    checksums: tuple[int, ...]


def signature(batch: Any) -> Signature:
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_in(batch))


def describe_batches(
    batches: Sequence[Any],
    weights: Sequence[Any],
    wanted: int | None,
    problem_of: Callable[[Any], Problem | None],
) -> BatchDescription:
    """Describe the micro-batches. `wanted` is how many a step has, None for any number; `problem_of` returns
    what no piece can do."""
    shapes = [signature(batch) for batch in batches]
    numbers, wrong = numbers_of(weights, len(batches))
    problem = wrong_number(len(batches), wanted) or _unlike(shapes)
    problem = problem or next(filter(None, map(problem_of, batches)), None) or wrong
    return BatchDescription(problem, tuple(shapes[:1]), numbers, tuple(map(checksum, batches)))


def _unlike(signatures: list[Signature]) -> Problem | None:
    other = next((number for number, signature in enumerate(signatures) if signature != signatures[0]), None)
    if other is None:
        return None
    return Problem(
        "micro_batches",
        "must have the same shapes, because memory for what travels is laid out once",
        got=f"{signatures[0]} and, in micro-batch {other}, {signatures[other]}",
        do="Pad them to one length.",
    )


def difference(given_by_rank: Mapping[int, BatchDescription]) -> Problem | None:
    """Return the first difference between the micro-batches of ranks, given by world rank."""
    (first, mine), *others = given_by_rank.items()
    for rank, other in others:
        where, pair = "micro_batches", ("", "")
        if len(mine.checksums) != len(other.checksums):
            pair = str(len(mine.checksums)), str(len(other.checksums))
        elif mine.shapes != other.shapes:
            pair = f"shapes {mine.shapes[0]}", str(other.shapes[0])
        elif mine.weights != other.weights:
            where, pair = "weights", (str(list(mine.weights)), str(list(other.weights)))
        elif mine.checksums != other.checksums:
            pairs = enumerate(zip(mine.checksums, other.checksums, strict=True))
            number = next(number for number, (one, two) in pairs if one != two)
            pair = f"one micro-batch {number}", "one with other contents"
        if any(pair):
            return Problem(
                where,
                "must be the same on every stage of a pipeline",
                got=f"{pair[0]} on rank {first}, {pair[1]} on rank {rank}",
                do="Give the data of one data rank to all of its stages.",
            )
    return None


def checksum(batch: Any) -> int:
    """Return a checksum of all values and their places; the order of keys does not count."""
    total = 0
    for path, leaf in _leaves(batch, ""):
        if isinstance(leaf, torch.Tensor):
            total = zlib.crc32(f"{path} {tuple(leaf.shape)} {leaf.dtype}".encode(), total)
            whole = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
            flat = whole.cpu().contiguous().reshape(-1)
            total = zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", total)
        else:
            known = isinstance(leaf, str | bytes | bool | int | float | complex | None)
            shown = repr(leaf) if known else type(leaf).__qualname__
            total = zlib.crc32(f"{path} {shown}".encode(), total)
    return total


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value
