"""From one kind of checkpoint to another, in one process and without a whole model in memory.

Sources are in `sources.py`. A target is a folder of safetensors files, with what `transformers` needs where
the model is known, or a checkpoint that an engine resumes from. Moments survive where the source has them;
where it has none, that is said.

Invariant: weights that come in fp32 leave in fp32 or are rounded once; nothing is left out unsaid.
"""

from __future__ import annotations

import math
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import CheckpointError, Problems, UnsupportedError
from zerodrift.io.atomic import new_folder
from zerodrift.io.checkpoint.contents import VERSIONS
from zerodrift.io.checkpoint.descriptions import (
    Description,
    rank_files,
    state_file,
    tensors_file,
    write_description,
)
from zerodrift.io.checkpoint.folder import CheckpointFolder, automatic, save_of
from zerodrift.io.checkpoint.index import write_index
from zerodrift.io.checkpoint.items import Item, moment_key, weight_key, write_items
from zerodrift.io.checkpoint.manifest import (
    SHARED,
    Manifest,
    SavedParameter,
    write_entries,
    write_manifest,
    write_whole,
)
from zerodrift.io.checkpoint.packing import packed
from zerodrift.io.paths import kind_at, writing
from zerodrift.io.progress import ProgressBar
from zerodrift.io.safetensors.boxes import Shape
from zerodrift.io.safetensors.conversions import saved_form
from zerodrift.io.safetensors.export import exported_dtype, main_dtype, write_config
from zerodrift.io.safetensors.files import (
    INDEX,
    SHARD_SIZE,
    TensorFile,
    index_text,
    pack,
    size_in_bytes,
)
from zerodrift.io.safetensors.writer import SafetensorsWriter
from zerodrift.io.sources import ConvertSource, Trained, open_source
from zerodrift.mesh import MeshShape
from zerodrift.model.module import transient

Target = Literal["safetensors", "checkpoint"]
ALIKE = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "*.model")
"""Files beside a model's config that belong to it, and are copied along."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How to convert."""

    to: Target | None = None
    """None: a checkpoint from DeepSpeed or safetensors, safetensors from ours."""
    dtype: str | None = None
    max_shard_size: int | str = SHARD_SIZE
    overwrite: bool = False
    tag: str = ""
    trust: bool = False
    optimizer: str = ""


@dataclass(frozen=True, slots=True)
class Converted:
    """What was done."""

    source: str
    target: str
    path: Path
    parameters: int
    elements: int
    bytes: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"from  {self.source}",
            f"to    {self.target}: {self.path}",
            f"      {self.parameters:,} parameters, {self.elements:,} elements, {self.bytes / 1e9:.3g} GB",
            *(f"note  {note}" for note in self.notes),
        ]
        return "\n".join(lines) + "\n"


def convert(
    source: Path,
    target: Path,
    asked: ConvertOptions | None = None,
    model: str | None = None,
    shown: bool = False,
) -> Converted:
    """Convert whatever is at `source`. `model` is a folder with a `transformers` config, or such a file: with
    it, names and layout are those of the architecture's checkpoints on one side, of its module on the other.
    """
    asked = asked or ConvertOptions()
    module, folder = _model(model, source)
    opened = open_source(source, module, asked.tag, asked.trust, asked.optimizer)
    ours = opened.kind.startswith("a zerodrift")
    to: Target = asked.to or ("safetensors" if ours else "checkpoint")
    if to == "checkpoint" and ours:
        raise UnsupportedError(
            "--to", "must be safetensors for a zerodrift checkpoint", got=repr(to), do="It is one already."
        )
    if to == "checkpoint" and asked.dtype is not None:
        raise UnsupportedError("--dtype", "must be left out where `--to` is checkpoint, which holds fp32")
    if module is not None:
        _check(opened, module)
    if to == "safetensors":
        return _to_safetensors(opened, target, asked, module, folder, shown)
    return to_checkpoint(opened, target, shown)


def _model(model: str | None, source: Path) -> tuple[nn.Module | None, Path | None]:
    """The model of a config, without weights; that of the source's own folder where there is one."""
    from zerodrift.model import huggingface

    if model is None:
        if not (
            kind_at(source) == "folder"
            and (source / huggingface.CONFIG).is_file()
            and huggingface.is_installed()
        ):
            return None, None
        model = str(source)
    path = Path(model).expanduser()
    file = path / huggingface.CONFIG if path.is_dir() else path
    huggingface.from_hf(path)  # refuses what cannot be built, in its words
    return huggingface.build(file), file.parent


def _check(source: ConvertSource, model: nn.Module) -> None:
    """The source must be of this model."""
    here = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    there = {name: entry.shape for entry in source.entries for name in entry.names}
    problems = Problems()
    for name, shape in here.items():
        if name in there and there[name] != shape:
            problems.add(
                name, f"must have shape {list(shape)}, as the model has it", got=str(list(there[name]))
            )
    known = {id(value): name for name, value in model.named_parameters()}
    missing = [name for name in known.values() if name not in there]
    extra = [entry.name for entry in source.entries if not set(entry.names) & here.keys()]
    for what, names in (("hold", missing), ("not hold", extra)):
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            got = ", ".join(names[:10]) + more
            problems.add(
                str(source.path),
                f"must {what} what the model {'has' if what == 'hold' else 'lacks'}",
                got=got,
            )
    problems.raise_as(CheckpointError, f"`{source.path}` is not of a {type(model).__name__}")


# --- to safetensors ---------------------------------------------------------------------------------------


def _to_safetensors(
    source: ConvertSource,
    target: Path,
    asked: ConvertOptions,
    model: nn.Module | None,
    folder: Path | None,
    shown: bool,
) -> Converted:
    names, shapes, dtypes = _chosen(source, model, exported_dtype(asked.dtype))
    size = size_in_bytes(asked.max_shard_size, "--max-shard-size")
    files = pack(saved_form(nn.Module() if model is None else model, shapes, dtypes), size)
    with new_folder(target, asked.overwrite) as new, writing(target):
        writer = SafetensorsWriter(new.path, files)
        writer.create()
        _documents(new.path, files, model, folder)
        _pour(source, names, writer, files, shown)
        new.publish()
    notes = list(source.notes)
    if model is None:
        notes.append(
            "Names and layout are the module's own, and there is no config. Give `--model` with the config "
            "for a folder that `transformers` loads."
        )
    if source.trained is not None and source.trained.optimizer:
        notes.append("Moments and counters were left out: safetensors files hold weights alone.")
    return Converted(
        source.kind, "safetensors files", target, len(names), source.elements, writer.written, tuple(notes)
    )


def _chosen(
    source: ConvertSource, model: nn.Module | None, dtype: DType | None
) -> tuple[dict[str, SavedParameter], dict[str, Shape], dict[str, DType]]:
    """What is written, under which name, shape and dtype, in the order of the model."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    names = {next((n for n in entry.names if n not in tied), entry.name): entry for entry in source.entries}
    shapes: dict[str, Shape] = {name: entry.shape for name, entry in names.items()}
    dtypes = {name: _dtype(source, entry, dtype) for name, entry in names.items()}
    hidden = transient(model) if model is not None else ()
    known = None if model is None else {name for name, _ in model.named_buffers()}
    for name, buffer in source.buffers.items():
        if name not in hidden and (known is None or name in known):
            shapes[name] = tuple(buffer.shape)
            dtypes[name] = DType(_dtype_name(buffer))
    return names, shapes, dtypes


def _dtype(source: ConvertSource, entry: SavedParameter, dtype: DType | None) -> DType:
    """As asked, unless a plan pins it; else what the plan exports; else what is there."""
    row = None if source.plan is None else source.plan.row(entry.name)
    held = DType(entry.dtype)
    if not held.is_floating:
        return held
    if row is not None and (dtype is None or row.columns.pinned):
        return row.columns.export
    return held if dtype is None else dtype


def _dtype_name(tensor: torch.Tensor) -> str:
    dtype = from_torch(tensor.dtype)
    if dtype is None:
        raise CheckpointError("buffer", "must have a dtype that zerodrift knows", got=tensor.dtype)
    return dtype.value


def _pour(
    source: ConvertSource,
    names: dict[str, SavedParameter],
    writer: SafetensorsWriter,
    files: tuple[TensorFile, ...],
    shown: bool,
) -> None:
    bar = ProgressBar(
        f"writing {len(files)} files", sum(t.nbytes for file in files for t in file.tensors), shown
    )
    try:
        for name, entry in names.items():
            for start, values in source.weight(entry):
                before = writer.written
                writer.write(name, start, values)
                bar(writer.written - before)
        for name, buffer in source.buffers.items():
            if name in writer:
                writer.write(name, 0, buffer.reshape(-1))
        writer.close()
    finally:
        bar.close()
        writer.close(sync=False)


def _documents(
    path: Path, files: tuple[TensorFile, ...], model: nn.Module | None, folder: Path | None
) -> None:
    if len(files) > 1:
        (path / INDEX).write_text(index_text(files), encoding="utf-8")
    if model is not None:
        write_config(path, model, main_dtype(files))
    for pattern in ALIKE if folder is not None else ():
        for file in sorted(folder.glob(pattern)) if folder is not None else ():
            if file.is_file():
                shutil.copyfile(file, path / file.name)


# --- to our checkpoint ------------------------------------------------------------------------------------


def to_checkpoint(source: ConvertSource, target: Path, shown: bool = False) -> Converted:
    """A source as a checkpoint of ours, in a folder that holds none yet."""
    trained = source.trained or Trained(0, 0, "", 0, (), None, "", None, "fp32", 0, 1, None)
    folder, tag = CheckpointFolder(target), automatic(trained.step)
    with writing(target), folder.begin(tag, lambda: _require_none(folder)) as new:
        size = _write_checkpoint(source, trained, new.path, tag, shown)
        home = folder.publish(new)
    notes = list(source.notes)
    if not trained.optimizer:
        notes.append(
            "There is no optimizer state: load it with `allow=('optimizer',)`, and moments begin at zero."
        )
    return Converted(
        source.kind, "a zerodrift checkpoint", home, len(source.entries), source.elements, size, tuple(notes)
    )


def _require_none(folder: CheckpointFolder) -> None:
    tags = folder.tags()
    if tags:
        raise CheckpointError(
            folder.path, "must hold no checkpoint yet", got=", ".join(tags[:5]), do="Choose another folder."
        )


def _write_checkpoint(source: ConvertSource, trained: Trained, path: Path, tag: str, shown: bool) -> int:
    entries = tuple(_saved(entry) for entry in source.entries)
    bar = ProgressBar(
        f"writing {path.parent}", 4 * sum((1 + len(e.moments)) * math.prod(e.shape) for e in entries), shown
    )
    try:
        data, written = write_items(path / tensors_file(0), _items(source, bar))
    finally:
        bar.close()
    files = [write_index(path, written), write_entries(path, entries)]
    shared = {
        "global_steps": trained.step,
        "skipped_steps": trained.skipped,
        "scaler": None if trained.scaler is None else dict(trained.scaler),
        "schedule": trained.schedule_state,
        "groups": [dict(group) for group in trained.groups],
        "counters": {"": {"steps": trained.updates}} if trained.optimizer else {},
        "buffers": {name: buffer.detach().clone() for name, buffer in source.buffers.items()},
        "alike": True,
    }
    files.append(write_whole(path / SHARED, packed(shared, "schedule")))
    own = {"random": None, "client": trained.client, "modules": {}, "buffers": {}}
    state = write_whole(path / state_file(0), packed(own, "client"))
    sums = write_description(path, Description(save_of(path), 0, data, state, tuple(written)))
    manifest = Manifest(
        run=uuid.uuid4().hex,
        tag=tag,
        step=trained.step,
        skipped=trained.skipped,
        saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=VERSIONS,
        source=str(source.path.name),
        mode=trained.mode,
        stage=trained.stage,
        mesh=MeshShape(trained.ranks),
        digest="",
        optimizer=trained.optimizer,
        schedule=trained.schedule,
        loss_scale=float(trained.scaler["scale"]) if trained.scaler else 1.0,
        lr=tuple(float(group["lr"]) for group in trained.groups if "lr" in group),
        ranks=0,
        parameters=len(entries),
        elements=source.elements,
        files=tuple(sorted(files, key=lambda file: file.name)),
        of_ranks=rank_files(save_of(path), 1, sums),
    )
    write_manifest(path, manifest)
    return manifest.bytes


def _saved(entry: SavedParameter) -> SavedParameter:
    """Weights of trained parameters rest in fp32 in a checkpoint."""
    floating = DType(entry.dtype).is_floating
    dtype = DType.FP32.value if floating and DType.FP32.holds(DType(entry.dtype)) else entry.dtype
    return SavedParameter(entry.names, entry.shape, dtype, entry.group, entry.moments)


def _items(source: ConvertSource, bar: Callable[[int], None]) -> Iterator[Item]:
    for entry in source.entries:
        numel, dtype = math.prod(entry.shape), DType(_saved(entry).dtype).torch
        for start, values in source.weight(entry):
            yield Item(weight_key(entry.name), numel, start, values.detach().to(dtype))
            bar(4 * values.numel())
        for key in entry.moments:
            for start, values in source.moment(entry, key):
                yield Item(moment_key(key, entry.name), numel, start, values.detach().float())
                bar(4 * values.numel())
