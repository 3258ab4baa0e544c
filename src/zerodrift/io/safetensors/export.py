"""A trained model as a folder that `transformers` and everybody else can load.

Every rank writes its own slices at their places (`writer.py`) in files whose layout follows from the plan
(`files.py`), so a model of any size leaves without being whole anywhere. Values are those of the `export`
column: the bits of storage where that has the same dtype, otherwise the master, rounded once. Names and
layout are those of the architecture's own checkpoints (`conversions.py`).

Invariant: the folder is whole or not there, and a pinned parameter is in it with every bit.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerodrift.dtypes import ADMITTED, DType, parse
from zerodrift.engine.shards import Shards
from zerodrift.errors import CheckpointError, ConfigError
from zerodrift.io.atomic import NewFolder, new_folder
from zerodrift.io.checkpoint.checkpoints import everywhere
from zerodrift.io.paths import writing
from zerodrift.io.progress import ProgressBar
from zerodrift.io.safetensors.boxes import Shape
from zerodrift.io.safetensors.conversions import saved_form
from zerodrift.io.safetensors.files import INDEX, SHARD_SIZE, TensorFile, index_text, pack, size_in_bytes
from zerodrift.io.safetensors.writer import SafetensorsWriter
from zerodrift.plan.stages import named
from zerodrift.plan.table import Plan, Row

if TYPE_CHECKING:
    from zerodrift.engine.engine import Engine


_UNBOUNDED = 2**62
"""Bytes of a file that takes whatever there is."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A model folder that was written: its files, their size, and the dtypes in them. Prints as one line."""

    path: Path
    files: tuple[str, ...]
    bytes: int
    """Of all tensors."""
    dtypes: tuple[tuple[str, int], ...]
    """(dtype, tensors)."""
    seconds: float

    def __str__(self) -> str:
        held = ", ".join(f"{count:,} {dtype}" for dtype, count in self.dtypes)
        return (
            f"exported    {self.path}: {len(self.files)} file{'s' if len(self.files) > 1 else ''}, "
            f"{self.bytes / 1e9:.3g} GB, {held} tensors in {self.seconds:.1f} s"
        )


def export(
    engine: Engine,
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: int | str | None = SHARD_SIZE,
    overwrite: bool = False,
) -> Exported:
    """Write the model of an engine. Collective: every rank calls it alike.

    `dtype` replaces the `export` column of every floating parameter that is not pinned. Without a
    `max_shard_size` there is one file.
    """
    begin = time.monotonic()
    comm, rank = engine.comm, engine.mesh.rank()
    target = Path(folder).expanduser()
    files = everywhere(comm, lambda: _files(engine, dtype, max_shard_size))
    buffers = _buffers(engine)
    started: list[NewFolder] = []

    def start() -> str:
        if rank == 0:
            started.append(new_folder(target, overwrite))
            with writing(target):
                SafetensorsWriter(started[0].path, files).create()
                _write_documents(started[0].path, engine.whole, files)
        return str(started[0].path) if started else ""

    try:
        path = Path(comm.broadcast_object(everywhere(comm, start), 0))
        everywhere(comm, lambda: _must_see(path, files, rank))
        everywhere(comm, lambda: _write(engine, path, files, buffers))
        everywhere(comm, lambda: _publish(started, target))
    finally:
        for new in started:
            new.remove()
    tensors = [tensor for file in files for tensor in file.tensors]
    counts = Counter(str(tensor.dtype) for tensor in tensors)
    return Exported(
        target,
        tuple(file.name for file in files),
        sum(tensor.nbytes for tensor in tensors),
        tuple(sorted(counts.items())),
        time.monotonic() - begin,
    )


# --- what goes where --------------------------------------------------------------------------------------


def _files(engine: Engine, dtype: str | None, max_shard_size: int | str | None) -> tuple[TensorFile, ...]:
    shapes, dtypes = contents(engine.plan, engine.whole, exported_dtype(dtype))
    return pack(
        saved_form(engine.whole, shapes, dtypes),
        _UNBOUNDED if max_shard_size is None else size_in_bytes(max_shard_size),
    )


def _buffers(engine: Engine) -> dict[str, torch.Tensor]:
    """The buffers that this rank writes: on one data rank, those that no stage before it has."""
    mine = dict(engine.module.named_buffers())
    stages = engine.comm.all_gather_object(tuple(mine), "pipeline")
    before = {name for names in stages[: engine.mesh.rank("pipeline")] for name in names}
    return {
        name: buffer for name, buffer in mine.items() if name not in before and not engine.mesh.rank("data")
    }


def exported_dtype(text: str | None) -> DType | None:
    """What `dtype` means; None leaves it to the plan."""
    if text is None:
        return None
    dtype = parse(text)
    if dtype not in ADMITTED["export"]:
        raise ConfigError("dtype", "must be fp32, bf16 or fp16", got=repr(text))
    return dtype


def contents(plan: Plan, model: nn.Module, dtype: DType | None) -> tuple[dict[str, Shape], dict[str, DType]]:
    """Shape and dtype of what is exported, in the order of the model, tied parameters once."""
    buffers = {row.name: row for row in plan.buffers}
    ignored = {str(name) for name in getattr(model, "_keys_to_ignore_on_save", None) or ()}
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, DType] = {}
    for name, kept in _state_names(model):
        if name in ignored:
            continue
        row = plan.row(name)
        if row is not None and name == saved_name(row, model):
            shapes[name], dtypes[name] = row.whole_shape, _dtype_of(row, dtype)
        elif row is None and kept and name in buffers:
            shapes[name], dtypes[name] = buffers[name].shape, buffers[name].storage
    return shapes, dtypes


def _dtype_of(row: Row, dtype: DType | None) -> DType:
    return row.columns.export if dtype is None or row.columns.pinned else dtype


def _state_names(model: nn.Module) -> list[tuple[str, bool]]:
    """Names as a state dict has them, each with whether it is kept there."""
    names = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        names += [(prefix + name, True) for name, value in module._parameters.items() if value is not None]
        for name, value in module._buffers.items():
            if value is not None:
                names.append((prefix + name, name not in module._non_persistent_buffers_set))
    return names


def saved_name(row: Row, model: nn.Module) -> str:
    """The name that a tied parameter is written under: the one that `transformers` ties others to."""
    # A dict in transformers 5, a list of patterns in 4; a name that it says is tied to another is not saved.
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    own = [name for name in row.names if not any(re.fullmatch(pattern, name) for pattern in tied)]
    return (own or list(row.names))[0]


def _publish(started: Sequence[NewFolder], target: Path) -> None:
    for new in started:
        with writing(target):
            new.publish()


# --- writing ----------------------------------------------------------------------------------------------


def _must_see(path: Path, files: tuple[TensorFile, ...], rank: int) -> None:
    """Files that rank 0 has made must be there for every other."""
    for file in files:
        there = path / file.name
        if not there.is_file() or there.stat().st_size != file.size:
            raise CheckpointError(
                path.parent,
                "must be a folder that every rank sees",
                got=f"rank {rank} on {os.uname().nodename}, which does not see what rank 0 has made in it",
                do="Export to a file system that all machines share.",
            )


def _write(
    engine: Engine, path: Path, files: tuple[TensorFile, ...], buffers: Mapping[str, torch.Tensor]
) -> None:
    """What this rank owns."""
    writer = SafetensorsWriter(path, files)
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    bar = ProgressBar(
        f"exporting to {path.parent}", total // engine.mesh.size("world"), engine.mesh.rank() == 0
    )
    try:
        with writing(path):
            for piece in Shards(engine).pieces():
                wide: torch.Tensor | None = None
                stored = piece.stored()
                for span in piece.share:
                    name = saved_name(named(engine.plan, span.row), engine.whole)
                    if name not in writer:
                        continue
                    flat = stored
                    if writer.dtype(name) is not span.row.columns.storage.dtype:
                        flat = wide = piece.weights() if wide is None else wide
                    before = writer.written
                    writer.write(name, span.start, span.part(flat).values)
                    bar(writer.written - before)
            for name, buffer in buffers.items():
                if name in writer:
                    writer.write(name, 0, buffer.detach().reshape(-1))
    except BaseException:
        writer.close(sync=False)
        raise
    finally:
        bar.close()
    with writing(path):
        writer.close()


def _write_documents(path: Path, model: nn.Module, files: tuple[TensorFile, ...]) -> None:
    """The index, and what `transformers` needs to build the model."""
    if len(files) > 1:
        (path / INDEX).write_text(index_text(files), encoding="utf-8")
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        write_config(path, model, main_dtype(files))


def write_config(path: Path, model: Any, dtype: DType) -> None:
    """`config.json`, and `generation_config.json` where the model generates. The model's own stay as they
    are."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype.torch).removeprefix("torch.")
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # what was trained, and is written, is not quantized
    config.save_pretrained(path)
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(model, "can_generate") and model.can_generate():
        generation.save_pretrained(path)


def main_dtype(files: tuple[TensorFile, ...]) -> DType:
    """The floating dtype that most elements have: what a loader takes for all where nobody says."""
    counts: Counter[DType] = Counter()
    for file in files:
        for tensor in file.tensors:
            if tensor.dtype.is_floating:
                counts[tensor.dtype] += tensor.numel
    return counts.most_common(1)[0][0] if counts else DType.FP32
