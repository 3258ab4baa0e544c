"""What can be converted, as one thing: weights, moments and counters by parameter name, a run at a time.

A source is our checkpoint, DeepSpeed's, or safetensors files. Which it is, is found out by looking; what
becomes of it is `convert.py`'s business.

Invariant: nothing but headers is read until a run is asked for, and a run is a few megabytes or a view of a
mapped file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift import optimizers
from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import CheckpointError, ZerodriftError, said
from zerodrift.io.checkpoint import state as states
from zerodrift.io.checkpoint.descriptions import verified
from zerodrift.io.checkpoint.folder import LATEST, CheckpointFolder
from zerodrift.io.checkpoint.items import CHUNK, CheckpointReader, Destination, moment_key, weight_key
from zerodrift.io.checkpoint.manifest import (
    MANIFEST,
    SHARED,
    Manifest,
    SavedParameter,
    read_entries,
    read_plan,
)
from zerodrift.io.deepspeed.checkpoint import DeepSpeedCheckpoint, open_deepspeed
from zerodrift.io.deepspeed.files import is_deepspeed
from zerodrift.io.deepspeed.parts import Run
from zerodrift.io.paths import kind_at, short
from zerodrift.io.safetensors.matching import Expected, expected
from zerodrift.io.safetensors.weights import SafetensorsWeights
from zerodrift.model import safetensors
from zerodrift.model.sources import describe
from zerodrift.plan.table import Plan


@dataclass(frozen=True, slots=True)
class Trained:
    """Where a run was; what safetensors files do not have."""

    step: int
    skipped: int
    optimizer: str
    """What the moments mean, `adamw`; empty where there are none."""
    updates: int
    """Steps that the optimizer has counted."""
    groups: tuple[Mapping[str, Any], ...]
    scaler: Mapping[str, Any] | None
    schedule: str
    schedule_state: Any
    mode: str
    stage: int
    ranks: int
    client: Any


@dataclass(frozen=True, slots=True)
class ConvertSource:
    """Something that can be converted."""

    kind: str
    path: Path
    entries: tuple[SavedParameter, ...]
    buffers: Mapping[str, torch.Tensor]
    weight: Callable[[SavedParameter], Iterator[Run]]
    moment: Callable[[SavedParameter, str], Iterator[Run]]
    trained: Trained | None = None
    plan: Plan | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def elements(self) -> int:
        return sum(math.prod(entry.shape) for entry in self.entries)


def open_source(
    path: Path, model: nn.Module | None = None, tag: str = "", trust: bool = False, optimizer: str = ""
) -> ConvertSource:
    """Whatever is at `path`."""
    kind = kind_at(path)
    if kind == "nothing":
        raise CheckpointError(short(path), "must be there to be converted", got="no such file or folder")
    try:
        return _open(path, kind == "folder", model, tag, trust, optimizer)
    except ZerodriftError:
        raise
    except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            short(path), "must be laid out as what it seems to be", got=said(error)
        ) from error


def _open(
    path: Path, folder: bool, model: nn.Module | None, tag: str, trust: bool, optimizer: str
) -> ConvertSource:
    if folder and (path / MANIFEST).is_file():
        return _from_zerodrift(path)
    if folder and (CheckpointFolder(path).tags() or CheckpointFolder(path).halves()):
        return _from_zerodrift(CheckpointFolder(path).find(tag or LATEST))
    if folder and (tag or is_deepspeed(path)):
        return from_deepspeed(open_deepspeed(path, tag, trust), optimizer)
    if not folder or safetensors.holds(path):
        return _safetensors(path, model)
    raise CheckpointError(
        short(path),
        "must be a zerodrift checkpoint, a DeepSpeed checkpoint or safetensors files",
        got="a folder with none of them",
        do="Give the folder that was saved to, or the one of a tag in it.",
    )


# --- our own ----------------------------------------------------------------------------------------------


def _from_zerodrift(path: Path) -> ConvertSource:
    manifest, table = verified(path), read_entries(path)
    reader, shared = CheckpointReader(path), states.read_state(path, SHARED)
    for entry in table:
        reader.check(entry)
    document = read_plan(path)
    return ConvertSource(
        f"a zerodrift checkpoint, step {manifest.step}",
        path,
        table,
        shared["buffers"],
        lambda entry: _chunks(reader, weight_key(entry.name), entry, DType(entry.dtype).torch),
        lambda entry, key: _chunks(reader, moment_key(key, entry.name), entry, torch.float32),
        _trained(manifest, shared),
        None if document is None else Plan.from_json(document),
    )


def _trained(manifest: Manifest, shared: Mapping[str, Any]) -> Trained:
    counters = shared["counters"].get("", {})
    return Trained(
        manifest.step,
        manifest.skipped,
        manifest.optimizer,
        int(counters.get("steps", manifest.step)),
        tuple(shared["groups"]),
        shared["scaler"],
        manifest.schedule,
        shared["schedule"],
        manifest.mode,
        manifest.stage,
        manifest.mesh.world,
        None,
    )


def _chunks(reader: CheckpointReader, key: str, entry: SavedParameter, dtype: torch.dtype) -> Iterator[Run]:
    total = math.prod(entry.shape)
    for start in range(0, total, CHUNK):
        into = torch.empty(min(CHUNK, total - start), dtype=dtype)
        reader.read([Destination(key, start, into)])
        yield start, into


# --- DeepSpeed's ------------------------------------------------------------------------------------------


def from_deepspeed(checkpoint: DeepSpeedCheckpoint, optimizer: str = "") -> ConvertSource:
    """`optimizer` is what the moments mean, where the checkpoint does not say it rightly."""
    entries = tuple(
        SavedParameter(
            (saved.name, *saved.aliases),
            saved.shape,
            _name(saved.dtype),
            saved.group,
            tuple(saved.moments),
        )
        for saved in checkpoint.parameters
    )
    by_name = {saved.name: saved for saved in checkpoint.parameters}
    kind, notes = _optimizer(checkpoint, optimizer)
    hysteresis = int((checkpoint.config.get("fp16") or {}).get("hysteresis", 2))
    scaler = None
    if checkpoint.scale is not None and checkpoint.dtype == "fp16":
        left = hysteresis if checkpoint.scale.left is None else checkpoint.scale.left
        scaler = {"scale": checkpoint.scale.scale, "left": left, "good": checkpoint.scale.good}
    schedule, state, more = _schedule(checkpoint)
    trained = Trained(
        checkpoint.counters.step,
        checkpoint.counters.skipped,
        kind,
        checkpoint.counters.updates,
        checkpoint.groups or tuple({} for _ in range(1 + max((entry.group for entry in entries), default=0))),
        scaler,
        schedule,
        state,
        checkpoint.dtype,
        checkpoint.stage,
        checkpoint.ranks,
        dict(checkpoint.client),
    )
    return ConvertSource(
        f"a DeepSpeed {checkpoint.version} checkpoint of stage {checkpoint.stage}, {checkpoint.ranks} ranks, "
        f"{checkpoint.dtype}, step {checkpoint.counters.step}",
        checkpoint.folder,
        entries,
        checkpoint.buffers,
        lambda entry: iter(by_name[entry.name].weight),
        lambda entry, key: iter(by_name[entry.name].moments[key]),
        trained,
        None,
        (*checkpoint.notes, *notes, *more),
    )


def _optimizer(checkpoint: DeepSpeedCheckpoint, said: str) -> tuple[str, tuple[str, ...]]:
    """What the moments mean: by their names, and by what the config or the groups say of weight decay."""
    keys = {key for saved in checkpoint.parameters for key in saved.moments}
    if not keys:
        return "", ()
    if said:
        return said.lower(), ()
    possible = optimizers.with_moments(keys)
    if len(possible) == 1:
        return possible[0].kind, ()
    written = checkpoint.config.get("optimizer") or {}
    if written:
        kind = str(written.get("type", "")).lower()
        coupled = kind == "adam" and (written.get("params") or {}).get("adam_w_mode") is False
        return ("adam" if coupled else "adamw"), ()
    flags = {group.get("decoupled_weight_decay") for group in checkpoint.groups}
    if flags <= {True} or flags <= {False}:
        return ("adamw" if flags == {True} else "adam"), ()
    return "adamw", (
        "The optimizer's class was not saved: its moments are taken for AdamW's. Say `--optimizer adam` if "
        "it was Adam with L2 decay.",
    )


def _schedule(checkpoint: DeepSpeedCheckpoint) -> tuple[str, Any, tuple[str, ...]]:
    """The name and state of the schedule where the config named one: DeepSpeed's and torch's have the same
    names and states here."""
    written = checkpoint.config.get("scheduler") or {}
    if checkpoint.schedule is None:
        return "", None, ()
    if written.get("type") and isinstance(checkpoint.schedule, Mapping):
        return str(written["type"]), dict(checkpoint.schedule), ()
    note = "The learning rate schedule is not of the config: its state was left out."
    return "", None, (note,)


def _name(dtype: torch.dtype) -> str:
    known = from_torch(dtype)
    if known is None:
        raise CheckpointError("tensor", "must have a dtype that zerodrift knows", got=dtype)
    return known.value


# --- safetensors ------------------------------------------------------------------------------------------


def _safetensors(path: Path, model: nn.Module | None) -> ConvertSource:
    """Files as they are, or with a `model` in the names and layout of its module."""
    where = path.expanduser()
    module = nn.Module() if model is None else model
    spec = describe(str(path)) if model is None else describe(model)
    if model is None:
        tensors = safetensors.stored(where)
        want = tuple(Expected((tensor.name,), tensor.shape, tensor.dtype) for tensor in tensors)
    else:
        want = expected(spec.parameters, spec.buffers, model)
    files = SafetensorsWeights.open(where, module, want, True)
    buffers = {}
    for item in want:
        if item.is_buffer and files.holds(item.name):
            flat = torch.empty(math.prod(item.shape), dtype=item.dtype.torch)
            files.fill(item.name, 0, flat)
            buffers[item.name] = flat.view(item.shape)
    parameters = [item for item in want if not item.is_buffer]
    entries = tuple(
        SavedParameter(item.names, item.shape, _stored_dtype(files, item).value, -1, ())
        for item in parameters
    )
    kind = "safetensors files" if model is None else f"safetensors files of a {type(model).__name__}"
    return ConvertSource(
        kind,
        path,
        entries,
        buffers,
        lambda entry: _filled(files, entry),
        lambda entry, key: iter(()),
    )


def _stored_dtype(files: SafetensorsWeights, item: Expected) -> DType:
    dtype = from_torch(files.exact(item.name))
    return item.dtype if dtype is None else dtype


def _filled(files: SafetensorsWeights, entry: SavedParameter) -> Iterator[Run]:
    total, dtype = math.prod(entry.shape), DType(entry.dtype).torch
    for start in range(0, total, CHUNK):
        into = torch.empty(min(CHUNK, total - start), dtype=dtype)
        files.fill(entry.name, start, into)
        yield start, into
