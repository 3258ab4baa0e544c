"""Open a checkpoint of any kind as one class: weights, moments and counters by parameter name.

Invariant: only headers are read until a run of elements is requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift import checkpoint
from zerodrift.checkpoint import SavedParameter
from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import CheckpointError
from zerodrift.model import describe, safetensors
from zerodrift.plan import Plan
from zerodrift.weights.load import SafetensorsWeights
from zerodrift.weights.matching import ExpectedTensor, expected_tensors

Run = tuple[int, torch.Tensor]
"""(first element in row-major order, values)."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of a run in a zerodrift checkpoint; safetensors files do not have it."""

    step: int = 0
    skipped: int = 0
    optimizer: str = ""
    """The meaning of the moments, such as `adamw`; empty without moments."""
    updates: int = 0
    """Steps that the optimizer has counted."""
    groups: tuple[Mapping[str, Any], ...] = ()
    """Options of the parameter groups."""
    scaler: Mapping[str, Any] | None = None
    schedule: str = ""
    """The type of the config's schedule; empty without one."""
    schedule_state: Any = None
    mode: str = "fp32"
    stage: int = 0
    ranks: int = 1
    client: Any = None
    samples: int = 0


@dataclass(frozen=True, slots=True)
class ConvertSource:
    """A checkpoint that can be converted; `weight` and `moment` yield runs of elements."""

    kind: str
    path: Path
    entries: tuple[SavedParameter, ...]
    buffers: Mapping[str, torch.Tensor]
    weight: Callable[[SavedParameter], Iterator[Run]]
    moment: Callable[[SavedParameter, str], Iterator[Run]] = lambda entry, key: iter(())
    trained: TrainingState = TrainingState()
    plan: Callable[[], Plan | None] = lambda: None
    notes: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return sum(math.prod(entry.shape) for entry in self.entries)

    def whole(self, entry: SavedParameter, key: str = "") -> torch.Tensor:
        """Copy a whole weight, or a whole moment by its key."""
        runs = [run.reshape(-1) for _, run in (self.moment(entry, key) if key else self.weight(entry))]
        return torch.cat(runs).view(entry.shape) if runs else torch.zeros(entry.shape)


def dtype_of(dtype: torch.dtype, where: str) -> DType:
    known = from_torch(dtype)
    if known is None:
        raise CheckpointError(where, "must have a dtype that zerodrift knows", got=dtype)
    return known


def _chunks(
    read: Callable[[int, torch.Tensor], None], shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[Run]:
    """Yield a tensor in runs of at most CHUNK elements; `read(start, into)` fills one."""
    total = math.prod(shape)
    for start in range(0, total, checkpoint.CHUNK):
        into = torch.empty(min(checkpoint.CHUNK, total - start), dtype=dtype)
        read(start, into)
        yield start, into


def open_zerodrift(path: Path) -> ConvertSource:
    manifest, table = checkpoint.verified(path), checkpoint.read_entries(path)
    reader, shared = checkpoint.CheckpointReader(path), checkpoint.read_state(path, checkpoint.SHARED)
    for entry in table:
        reader.check(entry)

    def moment(entry: SavedParameter, key: str) -> Iterator[Run]:
        name = checkpoint.moment_key(key, entry.name)
        return _chunks(lambda start, into: reader.read([(name, start, into)]), entry.shape, torch.float32)

    def weight(entry: SavedParameter) -> Iterator[Run]:
        saved, dtype = held[entry.name], DType(entry.dtype).torch
        return _chunks(lambda start, into: reader.read_weights([(saved, start, into)]), entry.shape, dtype)

    held = {entry.name: entry for entry in table}
    # Weights in a narrow format are decoded.
    entries = tuple(replace(e, dtype="fp32") if DType(e.dtype).format is not None else e for e in table)
    return ConvertSource(
        f"a zerodrift checkpoint, step {manifest.step}",
        path,
        entries,
        checkpoint.persistent_buffers(shared),
        weight,
        moment,
        TrainingState(optimizer=manifest.optimizer),
        lambda: checkpoint.read_plan(path),
    )


def open_safetensors(path: Path, model: nn.Module | None) -> ConvertSource:
    """Open files under their own names, or with a `model` in the names and layout of the module."""
    where = path.expanduser()
    if model is None:
        want = tuple(ExpectedTensor((t.name,), t.shape, t.dtype) for t in safetensors.list_tensors(where))
    else:
        spec = describe(model)
        want = expected_tensors(spec.parameters, spec.buffers, model)
    files = SafetensorsWeights(where, nn.Module() if model is None else model, want, True)
    buffers, entries = {}, []
    for item in want:
        if not item.is_buffer:
            dtype = from_torch(files.exact(item.name)) or item.dtype
            entries.append(SavedParameter(item.names, item.shape, dtype.value, -1, ()))
        elif files.holds(item.name):
            flat = torch.empty(math.prod(item.shape), dtype=item.dtype.torch)
            files.fill(item.name, 0, flat)
            buffers[item.name] = flat.view(item.shape)

    def runs(entry: SavedParameter) -> Iterator[Run]:
        dtype = DType(entry.dtype).torch
        return _chunks(lambda start, into: files.fill(entry.name, start, into), entry.shape, dtype)

    kind = "safetensors files" if model is None else f"safetensors files of a {type(model).__name__}"
    return ConvertSource(kind, path, tuple(entries), buffers, runs)
