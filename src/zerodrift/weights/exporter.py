"""Export a trained model as a folder that `transformers` and everybody else can load.

Every rank writes its own slices. Values are those of the `export` column: the bits of storage if that has the
same dtype, otherwise the master, rounded once.

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

from zerodrift.checkpoint import NewFolder, everywhere, new_folder, writing
from zerodrift.dtypes import ADMITTED, DType, parse
from zerodrift.engine import Shards
from zerodrift.errors import CheckpointError, ConfigError
from zerodrift.model import non_persistent_buffers
from zerodrift.plan import Plan, Row, whole_row
from zerodrift.weights.boxes import Shape
from zerodrift.weights.conversions import saved_form
from zerodrift.weights.reader import ProgressBar
from zerodrift.weights.writer import SHARD_SIZE, SafetensorsWriter, TensorFile, pack, size_in_bytes

if TYPE_CHECKING:
    from zerodrift.engine import Engine

_UNBOUNDED = 2**62


@dataclass(frozen=True, slots=True)
class Exported:
    """A model folder that was written: its files, their size, and the dtypes in them. Prints as one line."""

    path: Path
    files: tuple[str, ...]
    bytes: int
    """Bytes of all tensors."""
    dtypes: tuple[tuple[str, int], ...]
    """(dtype, number of tensors)."""
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
    comm, rank, model = engine.comm, engine.mesh.rank(), engine.whole
    target = Path(folder).expanduser()

    def lay_out() -> tuple[TensorFile, ...]:
        shapes, dtypes = contents(engine.plan, model, exported_dtype(dtype))
        size = _UNBOUNDED if max_shard_size is None else size_in_bytes(max_shard_size)
        return pack(saved_form(model, shapes, dtypes), size)

    files = everywhere(comm, lay_out)
    buffers = dict(engine.module.named_buffers())
    stages = comm.all_gather_object(tuple(buffers), "pipeline")
    # One data rank writes the buffers that no stage before it has.
    before = {name for names in stages[: engine.mesh.rank("pipeline")] for name in names}
    writes = engine.mesh.rank("data") == 0
    buffers = {name: buffer for name, buffer in buffers.items() if writes and name not in before}
    started: list[NewFolder] = []
    """On rank 0 alone."""

    def start() -> str:
        if rank:
            return ""
        started.append(new_folder(target, overwrite))
        path = started[0].path
        with writing(target):
            SafetensorsWriter(path, files).create()
            write_config(path, files, model if hasattr(model, "config") else None)
        return str(path)

    def publish() -> None:
        for new in started:
            with writing(target):
                new.publish()

    try:
        path = Path(comm.broadcast_object(everywhere(comm, start), 0))
        everywhere(comm, lambda: _check_visible(path, files, rank))
        everywhere(comm, lambda: _write(engine, path, files, buffers))
        everywhere(comm, publish)
    finally:
        for new in started:
            new.remove()
    tensors = [tensor for file in files for tensor in file.tensors]
    counts = Counter(str(tensor.dtype) for tensor in tensors)
    names, size = tuple(file.name for file in files), sum(tensor.nbytes for tensor in tensors)
    return Exported(target, names, size, tuple(sorted(counts.items())), time.monotonic() - begin)


def exported_dtype(text: str | None) -> DType | None:
    """Parse a dtype that replaces the `export` column."""
    dtype = None if text is None else parse(text)
    if dtype is not None and dtype not in ADMITTED["export"]:
        raise ConfigError("dtype", "must be fp32, bf16 or fp16", got=repr(text))
    return dtype


def contents(plan: Plan, model: nn.Module, dtype: DType | None) -> tuple[dict[str, Shape], dict[str, DType]]:
    """Return shapes and dtypes of what is exported, in the order of the model, tied parameters once."""
    buffers = {row.name: row for row in plan.buffers}
    ignored = {str(name) for name in getattr(model, "_keys_to_ignore_on_save", None) or ()}
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, DType] = {}
    hidden = non_persistent_buffers(model)
    names = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for held in (module._parameters, module._buffers)
        for name, value in held.items()
        if value is not None
    ]
    for name in names:
        row = None if name in ignored else plan.row(name)
        if row is not None and name == saved_name(row, model):
            shapes[name] = row.whole_shape
            dtypes[name] = row.columns.export if dtype is None or row.columns.pinned else dtype
        elif row is None and name in buffers and name not in hidden | ignored:
            shapes[name], dtypes[name] = buffers[name].shape, buffers[name].storage
    return shapes, dtypes


def saved_name(row: Row, model: nn.Module) -> str:
    """Return the name that a tied parameter is written under: the one that `transformers` ties others to."""
    # A dict in transformers 5, a list of patterns in 4.
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    own = [name for name in row.names if not any(re.fullmatch(pattern, name) for pattern in tied)]
    return (own or list(row.names))[0]


def _check_visible(path: Path, files: tuple[TensorFile, ...], rank: int) -> None:
    """Raise unless this rank sees the files that rank 0 has created."""
    for file in files:
        there = path / file.name
        if not there.is_file() or there.stat().st_size != file.size:
            must = "must be a folder that every rank sees"
            got = f"rank {rank} on {os.uname().nodename}, which does not see what rank 0 has made in it"
            do = "Export to a file system that all machines share."
            raise CheckpointError(path.parent, must, got=got, do=do)


def _write(
    engine: Engine, path: Path, files: tuple[TensorFile, ...], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Write the slices and buffers of this rank."""
    writer = SafetensorsWriter(path, files)
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    title, share = f"exporting to {path.parent}", total // engine.mesh.size("world")
    bar = ProgressBar(title, share, engine.mesh.rank() == 0)
    try:
        with writing(path):
            for piece in Shards(engine).pieces():
                masters: torch.Tensor | None = None
                stored = piece.stored()
                for span in piece.share:
                    name = saved_name(whole_row(engine.plan, span.row), engine.whole)
                    if name not in writer:
                        continue
                    flat = stored
                    columns = span.row.columns
                    if writer.dtype(name) is not columns.storage.dtype or columns.rounds_on_the_way:
                        flat = masters = piece.weights() if masters is None else masters
                    before = writer.written
                    writer.write(name, span.start, span.part(flat).values)
                    bar(writer.written - before)
            for name, buffer in buffers.items():
                if name in writer:
                    writer.write(name, 0, buffer.detach().reshape(-1))
            writer.close()
    finally:
        bar.close()
        writer.close(sync=False)


def write_config(path: Path, files: tuple[TensorFile, ...], model: Any | None) -> None:
    """Write `config.json` and `generation_config.json` of a model of `transformers`."""
    if model is None or not hasattr(model.config, "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    counts: Counter[DType] = Counter()
    for tensor in (tensor for file in files for tensor in file.tensors if tensor.dtype.is_floating):
        counts[tensor.dtype] += tensor.numel
    # A loader takes the dtype of most elements for all by default.
    main = counts.most_common(1)[0][0] if counts else DType.FP32
    config.dtype = str(main.torch).removeprefix("torch.")
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # trained weights are not quantized
    config.save_pretrained(path)
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(model, "can_generate") and model.can_generate():
        generation.save_pretrained(path)


def whole_values(engine: Engine, rows: Sequence[Row], keep: bool = True) -> list[torch.Tensor | None]:
    """Gather parameters with the bits of an export. Collective; ranks that do not `keep` them get None."""
    values: dict[str, torch.Tensor] = {}
    rest: list[Row] = []
    with torch.no_grad():
        with engine.gathered([row.name for row in rows]) as gathered:
            for row in rows:
                columns = row.columns
                if gathered[row.name].dtype is not columns.export.torch or columns.rounds_on_the_way:
                    rest.append(row)
                elif keep:
                    values[row.name] = gathered[row.name].clone()
        for row in rest:
            master = engine.parameter(row.name).master
            if keep:
                values[row.name] = master.to(row.columns.export.torch)
    return [values.get(row.name) for row in rows]
