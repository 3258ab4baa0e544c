"""Export a trained model as a folder of safetensors files that `transformers` loads.

Every rank writes its own slices. Values have the dtype of the `export` column: the bits of storage if storage
has the same dtype, otherwise the master weights, rounded once.

Invariant: the folder appears as a whole or not at all, and pinned parameters keep every bit.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.checkpoint import NewFolder, everywhere, new_folder, on_rank_0, writing
from zerodrift.dtypes import ADMITTED, DType, parse_among, word
from zerodrift.engine import Engine, SegmentShard, Span
from zerodrift.errors import CheckpointError, ConfigError, UnsupportedError, ZerodriftError, listed, several
from zerodrift.model import OwningModule, ParameterSpec, huggingface, non_persistent_buffers
from zerodrift.plan import Plan, Row, whole_row
from zerodrift.policy import exported_as
from zerodrift.weights.boxes import Shape
from zerodrift.weights.conversions import saved_form
from zerodrift.weights.quantised import NarrowMatrix, find_matrices, quantization_config, wide_modules
from zerodrift.weights.reader import ProgressBar
from zerodrift.weights.writer import SafetensorsWriter, TensorFile, pack, size_in_bytes

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
        written = f"{several(len(self.files), 'file')}, {self.bytes / 1e9:.3g} GB, {held} tensors"
        return f"exported    {self.path}: {written} in {self.seconds:.1f} s"


def export(
    engine: Engine,
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: int | str | None = "5GB",
    overwrite: bool = False,
) -> Exported:
    """Write the model of an engine as a folder that `transformers` loads.

    Every rank calls it and writes its own slices. Values have the dtypes of the `export` column; `dtype`,
    such as `"bf16"`, replaces it for every parameter that is not pinned. Files hold at most `max_shard_size`
    each, and None makes one file of the whole model. `overwrite` replaces the folder of another model.
    """
    begin = time.monotonic()
    comm, rank, model = engine.comm, engine.mesh.rank(), engine.whole
    target = Path(folder).expanduser()

    def plan_files() -> FolderLayout:
        shapes, dtypes = contents(engine.plan, model, exported_dtype(dtype))
        size = _UNBOUNDED if max_shard_size is None else size_in_bytes(max_shard_size)
        names = {saved_name(row.names, model): row.names for row in engine.plan.rows}
        return lay_out(model, shapes, dtypes, size, names)

    layout = everywhere(comm, plan_files)
    files = layout.files
    buffers = dict(engine.module.named_buffers())
    stages = comm.all_gather_object(tuple(buffers), "pipeline")
    # One data rank writes the buffers that no stage before it has.
    before = {name for names in stages[: engine.mesh.rank("pipeline")] for name in names}
    writes = engine.mesh.rank("data") == 0
    buffers = {name: buffer for name, buffer in buffers.items() if writes and name not in before}
    started: list[NewFolder] = []
    """The folder, on rank 0 alone."""

    def start() -> Path:
        started.append(new_folder(target, overwrite))
        path = started[0].path
        with writing(target):
            SafetensorsWriter(path, files).create()
            write_config(path, layout, model if hasattr(model, "config") else None)
        return path

    def publish() -> None:
        for new in started:
            with writing(target):
                new.publish()

    try:
        path = on_rank_0(comm, start)
        everywhere(comm, lambda: _check_visible(path, files, rank))
        everywhere(comm, lambda: _write(engine, path, files, buffers))
        if layout.matrices:
            everywhere(comm, lambda: _write_matrices(engine, path, layout))
        everywhere(comm, publish)
    finally:
        for new in started:
            new.remove()
    tensors = [tensor for file in files for tensor in file.tensors]
    names, size = tuple(file.name for file in files), sum(tensor.nbytes for tensor in tensors)
    # A matrix with its scales is one tensor.
    beside = {tensor.name for matrix in layout.matrices for tensor in matrix.tensors()}
    counts = Counter(str(tensor.dtype) for tensor in tensors if tensor.name not in beside)
    counts += Counter(str(matrix.tensor.dtype) for matrix in layout.matrices)
    return Exported(target, names, size, tuple(sorted(counts.items())), time.monotonic() - begin)


def exported_dtype(text: str | None) -> DType | None:
    """Parse a dtype that replaces the `export` column."""
    if text is None:
        return None
    admitted = ADMITTED["export"]
    with suppress(ConfigError):
        if (dtype := parse_among(text, admitted)) in admitted:
            return dtype
    words = [word(known, admitted) for known in admitted]
    raise ConfigError("dtype", f"must be {listed(words, 'or')}", got=repr(text))


def contents(plan: Plan, model: nn.Module, dtype: DType | None) -> tuple[dict[str, Shape], dict[str, DType]]:
    """Return shapes and dtypes of what is exported, in the order of the model, tied parameters once."""
    buffers = {row.name: row for row in plan.buffers}
    ignored = {str(name) for name in getattr(model, "_keys_to_ignore_on_save", None) or ()}
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, DType] = {}
    hidden, modules = non_persistent_buffers(model), dict(model.named_modules())
    names = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for held in (module._parameters, module._buffers)
        for name, value in held.items()
        if value is not None
    ]
    for name in names:
        row = None if name in ignored else plan.row(name)
        if row is not None and name == saved_name(row.names, model):
            shapes[name] = row.whole_shape
            held = specify(row.names, row.source, row.whole_shape, modules)
            dtypes[name] = exported_as(dtype, held, row.columns)
        elif row is None and name in buffers and name not in hidden | ignored:
            shapes[name], dtypes[name] = buffers[name].shape, buffers[name].storage
    return shapes, dtypes


def specify(
    names: Sequence[str], dtype: DType, shape: Shape, modules: Mapping[str, nn.Module]
) -> ParameterSpec:
    """Describe a parameter; `modules` are those of its model by path, whose own parameters may be sharded."""
    paths = [name.rpartition(".")[0] for name in names]
    owners = (OwningModule(path, type(modules[path]).__name__ if path in modules else "") for path in paths)
    return ParameterSpec(tuple(names), shape, dtype, tuple(owners))


def saved_name(names: Sequence[str], model: nn.Module | None) -> str:
    """Return the name of a tied parameter in files: the one that `transformers` ties the others to."""
    # A dict in transformers 5, a list of patterns in 4.
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    own = [name for name in names if not any(re.fullmatch(pattern, name) for pattern in tied)]
    return (own or names)[0]


def _check_visible(path: Path, files: tuple[TensorFile, ...], rank: int) -> None:
    """Raise unless this rank sees the files that rank 0 has created."""
    for file in files:
        there = path / file.name
        if not there.is_file() or there.stat().st_size != file.size:
            must = "must be a folder that every rank sees"
            got = f"rank {rank} on {os.uname().nodename}, which does not see the files of rank 0"
            do = "Export to a file system that all machines share."
            raise CheckpointError(path.parent, must, got=got, do=do)


def _write(
    engine: Engine, path: Path, files: tuple[TensorFile, ...], buffers: Mapping[str, torch.Tensor]
) -> None:
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    title, share = f"exporting to {path.parent}", total // engine.mesh.size("world")
    bar = closing(ProgressBar(title, share, engine.mesh.rank() == 0))
    with writing(path), bar as progress, SafetensorsWriter.opened(path, files, progress) as writer:
        for piece in engine.pieces():
            stored, masters = piece.stored(), cache(piece.weights)
            for span in piece.share:
                name = saved_name(whole_row(engine.plan, span.row).names, engine.whole)
                if name not in writer:
                    continue
                columns = span.row.columns
                is_stored = writer.dtype(name) is columns.storage.dtype and not columns.rounds_on_the_way
                flat = stored if is_stored else masters()
                writer.write(name, span.start, flat[span.place])
        for name, buffer in buffers.items():
            if name in writer:
                writer.write(name, 0, buffer.detach().reshape(-1))


def _write_matrices(engine: Engine, path: Path, layout: FolderLayout) -> None:
    """Collect one matrix at a time on all ranks; one of them encodes and writes it. Collective.

    The all-reduce sums the bits of elements as integers, since one rank has the bits and the others zeros.
    """
    comm, ranks, rank = engine.comm, engine.mesh.size("world"), engine.mesh.rank("world")
    spans: dict[str, list[tuple[SegmentShard, Span]]] = {}
    for piece in engine.pieces():
        for span in piece.share:
            name = saved_name(whole_row(engine.plan, span.row).names, engine.whole)
            spans.setdefault(name, []).append((piece, span))
    last: SegmentShard | None = None
    masters = torch.empty(0)
    failed: list[Exception] = []
    with SafetensorsWriter.opened(path, layout.files) as writer:
        for number, matrix in enumerate(layout.matrices):
            numel = matrix.tensor.numel
            flat = torch.zeros(numel + -numel % ranks, device=engine.mesh.device)
            for name in dict.fromkeys(part.parameter for part in matrix.tensor.parts):
                for piece, span in spans.get(name, ()):
                    if piece is not last:
                        last, masters = piece, piece.weights()
                    matrix.collect(flat, name, span.start, masters[span.place])
            whole = comm.all_reduce_sum(flat.view(torch.int32), "world").view(torch.float32)[:numel]
            if number % ranks == rank and not failed:
                try:
                    with writing(path):
                        matrix.write(whole, writer)
                except (OSError, ZerodriftError) as error:  # other ranks go on with the next matrix
                    failed.append(error)
        if failed:
            raise failed[0]


@dataclass(frozen=True, slots=True)
class FolderLayout:
    """The files of a folder, the narrow matrices in them, and the entries of config.json about them."""

    files: tuple[TensorFile, ...]
    matrices: tuple[NarrowMatrix, ...]
    plain: DType
    """The dtype of most elements that are not narrow, a loader's default for all of these."""
    kept: tuple[str, ...]
    """Linear layers and stacks that are not narrow; empty without narrow matrices."""


def lay_out(
    model: nn.Module,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, DType],
    shard_size: int,
    names: Mapping[str, Sequence[str]],
) -> FolderLayout:
    """Lay out a folder in the form that `from_pretrained` reads. `names` has all names of each parameter."""
    saved = saved_form(model, shapes, dtypes)
    counts: Counter[DType] = Counter()
    for tensor in saved:
        if tensor.dtype.is_floating and tensor.dtype.format is None:
            counts[tensor.dtype] += tensor.numel
    plain = counts.most_common(1)[0][0] if counts else DType.FP32
    tensors, matrices = find_matrices(saved, shapes, plain)
    kept: list[str] = []
    if matrices:
        every = {alias: shape for name, shape in shapes.items() for alias in names.get(name, (name,))}
        narrow = {a for name in shapes for a in names.get(name, (name,)) if dtypes[name].format is not None}
        kept = wide_modules(model, every, narrow)
    return FolderLayout(pack(tensors, shard_size), matrices, plain, tuple(kept))


def write_config(path: Path, layout: FolderLayout, model: Any | None) -> None:
    """Write `config.json` and `generation_config.json` of a model of `transformers`."""
    if model is None or not hasattr(model.config, "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [huggingface.architecture(model)]
    config.dtype = str(layout.plain.torch).removeprefix("torch.")
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # that of what was loaded
    if layout.matrices:
        dtype = layout.matrices[0].tensor.dtype
        config.quantization_config = quantization_config(dtype, layout.plain, layout.kept)
    config.save_pretrained(path)
    generation = getattr(model, "generation_config", None)
    if generation is not None and hasattr(model, "can_generate") and model.can_generate():
        generation.save_pretrained(path)


def whole_values(engine: Engine, rows: Sequence[Row], keep: bool = True) -> list[torch.Tensor | None]:
    """Gather parameters with the bits of an export. Collective. Ranks without `keep` get None for each."""
    values: dict[str, torch.Tensor] = {}
    rest: list[Row] = []
    if coded := [(row.name, row.columns.export) for row in rows if row.columns.export.format is not None]:
        must = "must have a plain `export` to be returned whole"
        do = "Write `precision.export` as a plain dtype; `zerodrift.export(dtype=...)` writes narrow files."
        raise UnsupportedError(coded[0][0], must, got=coded[0][1], do=do)
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
