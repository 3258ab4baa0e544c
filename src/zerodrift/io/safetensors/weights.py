"""Weights out of safetensors files, straight into the slices that ranks own.

`matching.py` says where each parameter's elements are, `reader.py` reads them; here the two are what an
engine fills its segments from, once when it is made (`initialize(weights=...)`) or later (`load_weights`).
A rank reads the bytes of its own slices. What rests whole on every rank is read in slices, too, and the
ranks exchange them, so the ranks that share one copy of the model read each byte of the files once between
them; every replica reads for itself.

Invariant: a master has the bits of the file, storage has them rounded once, and no rank holds more of the
files than one buffer of the reader's.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives
from zerodrift.dtypes import DType
from zerodrift.errors import ModelError
from zerodrift.io.paths import kind_at
from zerodrift.io.progress import ProgressBar
from zerodrift.io.safetensors.boxes import Box, within
from zerodrift.io.safetensors.matching import Expected, Filled, Match, Strict, match
from zerodrift.io.safetensors.reader import SafetensorsReader
from zerodrift.model.safetensors import stored

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 1 << 20
"""Elements that are compared at once where files hold a tied parameter twice."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights that were loaded from safetensors: how many bytes, how fast, and which names did not match."""

    path: str
    bytes: int
    """Read by all ranks together, headers not counted."""
    most: int
    """Read by the rank that read most."""
    seconds: float
    """Of the slowest rank."""
    peak: int
    """Peak resident bytes of a process so far, on the rank with the most."""
    missing: tuple[str, ...]
    """Names that kept the model's own values."""
    unexpected: tuple[str, ...]
    """Names in the files that nothing was read for."""

    def __str__(self) -> str:
        rate = self.bytes / self.seconds if self.seconds else 0.0
        text = (
            f"weights     {_size(self.bytes)} of {self.path} in {self.seconds:.1f} s, {_size(rate)}/s; "
            f"peak memory {_size(self.peak)} per rank"
        )
        if self.missing:
            text += f"\n            {_some(self.missing)} not in the files: the model's own values"
        if self.unexpected:
            text += f"\n            {_some(self.unexpected)} in the files not read"
        return text


class SafetensorsWeights:
    """The tensors of one checkpoint as a source that segments are filled from."""

    def __init__(self, match: Match) -> None:
        self.match = match
        self._reader = SafetensorsReader(self._progress)
        self._bar: ProgressBar | None = None
        self._begin = time.monotonic()

    @staticmethod
    def open(
        path: str | os.PathLike[str], model: nn.Module, want: Sequence[Expected], strict: Strict
    ) -> SafetensorsWeights:
        """Read the headers and settle what fills what; no weight is read yet."""
        where = Path(path).expanduser()
        kind_at(where)
        return SafetensorsWeights(match(where, stored(where), model, want, strict))

    def show(self, shown: bool, ranks: int) -> None:
        """Show a bar where that helps; `ranks` share the reading."""
        total = sum(tensor.stop - tensor.start for tensor in self.match.tensors)
        self._bar = ProgressBar(f"weights of {self.match.path}", total // ranks, shown)

    # --- a source of values -----------------------------------------------------------------------------

    def holds(self, name: str) -> bool:
        return name in self.match.filled

    def exact(self, name: str) -> torch.dtype:
        """A dtype that the values of a parameter are exact in."""
        return self.match.filled[name].exact.torch

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """The elements from `start` on of a parameter, into flat memory, cast to its dtype."""
        filled = self.match.filled[name]
        self._read(filled.boxes, start, out)
        for other in filled.again:
            self._compare(name, filled, other, start, out.numel())

    def _read(self, boxes: tuple[Box, ...], start: int, out: torch.Tensor) -> None:
        for box in within(boxes, start, start + out.numel()):
            self._reader.read(self.match.tensors[box.number], box, out, start)

    def _compare(self, name: str, filled: Filled, other: tuple[Box, ...], start: int, numel: int) -> None:
        """A tied parameter that the files hold twice must be the same twice: which one would be kept?"""
        for first in range(start, start + numel, WINDOW):
            count = min(WINDOW, start + numel - first)
            one, two = (torch.empty(count, dtype=_wide(filled.exact)) for _ in range(2))
            self._read(filled.boxes, first, one)
            self._read(other, first, two)
            if not torch.equal(one, two):
                second = self.match.tensors[other[0].number].name
                raise ModelError(
                    name,
                    f"must have the values of `{second}`, which the model ties to it",
                    got="others in the files",
                    do="Build the model untied, or remove the one that is not meant.",
                )

    # --- the end ------------------------------------------------------------------------------------------

    def _progress(self, count: int) -> None:
        if self._bar is not None:
            self._bar(count)

    def close(self) -> None:
        self._reader.close()
        if self._bar is not None:
            self._bar.close()

    def finish(self, model: nn.Module, comm: Collectives) -> LoadedWeights:
        """Close the files, and what all ranks did with them."""
        self.close()
        if hasattr(model, "base_model_prefix"):
            # What `from_pretrained` leaves behind, so that a model is saved in the form that it came in.
            model._weight_conversions = self.match.conversions  # type: ignore[assignment]
        mine = (self._reader.count, time.monotonic() - self._begin, peak_memory())
        counts, seconds, peaks = zip(*comm.all_gather_object(mine), strict=True)
        return LoadedWeights(
            self.match.path,
            sum(counts),
            max(counts),
            max(seconds),
            max(peaks),
            tuple(self.match.missing),
            tuple(self.match.unexpected),
        )


def peak_memory() -> int:
    """Bytes that this process has had resident at most so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _wide(dtype: DType) -> torch.dtype:
    return torch.float32 if dtype.is_floating else dtype.torch


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _some(names: tuple[str, ...]) -> str:
    first = ", ".join(names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3:,} more"
