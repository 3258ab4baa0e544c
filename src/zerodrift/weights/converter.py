"""Convert a checkpoint of one kind to another, in one process and without a whole model in memory.

The target is a folder of safetensors files, with `transformers`' config if the model is known, or a
checkpoint that an engine resumes from.

Invariant: fp32 weights stay fp32 or are rounded once, and notes name everything that was left out.
"""

from __future__ import annotations

import math
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from torch import nn

from zerodrift import checkpoint
from zerodrift.checkpoint import Manifest, SavedParameter
from zerodrift.dtypes import DType
from zerodrift.errors import (
    CheckpointError,
    ModelError,
    Problems,
    UnsupportedError,
    ZerodriftError,
    first_of,
    listed,
    nearest_path,
    said,
)
from zerodrift.mesh import MeshShape
from zerodrift.model import describe, huggingface, non_persistent_buffers, safetensors
from zerodrift.policy import exported_as
from zerodrift.weights.boxes import Shape
from zerodrift.weights.deepspeed.checkpoint import open_deepspeed
from zerodrift.weights.exporter import exported_dtype, lay_out, saved_name, specify, write_config
from zerodrift.weights.quantised import MatrixCollector
from zerodrift.weights.reader import ProgressBar
from zerodrift.weights.sources import ConvertSource, dtype_of, open_safetensors, open_zerodrift
from zerodrift.weights.writer import SHARD_SIZE, SafetensorsWriter, size_in_bytes

Target = Literal["safetensors", "checkpoint"]
ALIKE = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "*.model")
"""Files beside a model's config that are copied too."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of a conversion, as `zerodrift convert` takes them."""

    to: Target | None = None
    """None: safetensors from a zerodrift checkpoint, and a zerodrift checkpoint from anything else."""
    dtype: str | None = None
    max_shard_size: int | str = SHARD_SIZE
    overwrite: bool = False
    tag: str = ""
    trust: bool = False
    optimizer: str = ""


@dataclass(frozen=True, slots=True)
class ConversionResult:
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
    options: ConvertOptions | None = None,
    model: str | None = None,
    shown: bool = False,
) -> ConversionResult:
    """Convert the checkpoint at `source`.

    `model` is a `transformers` config, or a folder with one. Safetensors files then have the names and layout
    of the architecture's checkpoints, and checkpoints those of its module.
    """
    options = options or ConvertOptions()
    module, folder = _build_model(model, source)
    opened = open_source(source, module, options.tag, options.trust, options.optimizer)
    is_ours = opened.kind.startswith("a zerodrift")
    to: Target = options.to or ("safetensors" if is_ours else "checkpoint")
    if to == "checkpoint" and is_ours:
        must, do = "must be safetensors for a zerodrift checkpoint", "It is one already."
        raise UnsupportedError("--to", must, got=repr(to), do=do)
    if to == "checkpoint" and options.dtype is not None:
        raise UnsupportedError("--dtype", "must be left out where `--to` is checkpoint, which holds fp32")
    if module is not None:
        _check_model(opened, module)
    if to == "safetensors":
        return _to_safetensors(opened, target, options, module, folder, shown)
    return to_checkpoint(opened, target, shown)


def open_source(
    path: Path, model: nn.Module | None = None, tag: str = "", trust: bool = False, optimizer: str = ""
) -> ConvertSource:
    """Open the checkpoint at `path`, of whatever kind it is."""
    kind = checkpoint.kind_at(path)
    if kind == "nothing":
        must, got = "must exist to be converted", "no such file or folder"
        raise CheckpointError(checkpoint.short(path), must, got=got, do=nearest_path(path))
    try:
        if kind == "folder" and (path / checkpoint.MANIFEST).is_file():
            return open_zerodrift(path)
        folder = checkpoint.CheckpointFolder(path)
        if kind == "folder" and (folder.tags() or folder.halves()):
            return open_zerodrift(folder.find(tag or checkpoint.LATEST))
        if kind == "folder" and (tag or checkpoint.is_deepspeed(path)):
            return open_deepspeed(path, tag, trust, optimizer)
        if kind == "file" or safetensors.holds(path):
            return open_safetensors(path, model)
    except ZerodriftError:
        raise
    except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        must = "must have the layout of its kind"
        raise CheckpointError(checkpoint.short(path), must, got=said(error)) from error
    must = "must be a zerodrift checkpoint, a DeepSpeed checkpoint or safetensors files"
    do = "Give the folder that was saved to, or the one of a tag in it."
    raise CheckpointError(checkpoint.short(path), must, got="a folder with none of them", do=do)


def fill_module(module: nn.Module, path: Path) -> None:
    """Replace all parameters by the values of a checkpoint."""
    source = open_source(path.expanduser(), module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    entries = {name: entry for entry in source.entries for name in entry.names}
    names = [parameter.names for parameter in describe(module).parameters]
    lacking = [tied[0] for tied in names if not set(tied) & entries.keys()]
    if lacking:
        must = "must have a value for every parameter of the model"
        raise ModelError(path, must, got=f"none for {listed(lacking[:3])}")
    for tied in names:
        entry, parameter = entries[next(name for name in tied if name in entries)], parameters[tied[0]]
        if entry.shape != tuple(parameter.shape):
            must = f"must have shape {list(parameter.shape)}"
            raise ModelError(tied[0], must, got=f"{list(entry.shape)} in {path}")
        filled = nn.Parameter(source.whole(entry), requires_grad=False)
        for name in tied:
            set_parameter(module, name, filled)
    buffers = dict(module.named_buffers())
    for name, values in source.buffers.items():
        if name in buffers:
            buffers[name].copy_(values)


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    module.get_submodule(path)._parameters[attribute] = parameter


def _build_model(model: str | None, source: Path) -> tuple[nn.Module | None, Path | None]:
    """Build the model of a config without weights, by default of the config in the source's folder."""
    if model is None:
        has_config = checkpoint.kind_at(source) == "folder" and (source / huggingface.CONFIG).is_file()
        if not has_config or not huggingface.is_installed():
            return None, None
        model = str(source)
    path = Path(model).expanduser()
    file = path / huggingface.CONFIG if path.is_dir() else path
    huggingface.from_hf(path)  # raises if it cannot be built
    return huggingface.build(file), file.parent


def _check_model(source: ConvertSource, model: nn.Module) -> None:
    """Raise unless the source has the parameters of the model."""
    here = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    there = {name: entry.shape for entry in source.entries for name in entry.names}
    problems = Problems()
    for name, shape in here.items():
        if name in there and there[name] != shape:
            must = f"must have shape {list(shape)}, as the model has it"
            problems.add(name, must, got=str(list(there[name])))
    missing = [name for name, _ in model.named_parameters() if name not in there]
    extra = [entry.name for entry in source.entries if not set(entry.names) & here.keys()]
    found = {
        "must hold every tensor of the model": missing,
        "must hold no tensor that the model lacks": extra,
    }
    for must, names in found.items():
        if names:
            problems.add(str(source.path), must, got=first_of(names, 10))
    problems.raise_as(CheckpointError, f"`{source.path}` is not of a {type(model).__name__}")


def _to_safetensors(
    source: ConvertSource,
    target: Path,
    options: ConvertOptions,
    model: nn.Module | None,
    folder: Path | None,
    shown: bool,
) -> ConversionResult:
    names, shapes, dtypes = _select(source, model, exported_dtype(options.dtype))
    size = size_in_bytes(options.max_shard_size, "--max-shard-size")
    aliases = {name: entry.names for name, entry in names.items()}
    layout = lay_out(nn.Module() if model is None else model, shapes, dtypes, size, aliases)
    total = sum(tensor.nbytes for file in layout.files for tensor in file.tensors)
    bar = closing(ProgressBar(f"writing {len(layout.files)} files", total, shown))
    with checkpoint.new_folder(target, options.overwrite) as new, checkpoint.writing(target):
        with bar as progress, SafetensorsWriter.opened(new.path, layout.files, progress) as writer:
            writer.create()
            write_config(new.path, layout, model)
            matrices = MatrixCollector(layout.matrices, writer)
            if folder is not None:
                for file in sorted(file for pattern in ALIKE for file in folder.glob(pattern)):
                    if file.is_file():
                        shutil.copyfile(file, new.path / file.name)
            for name, entry in names.items():
                for start, values in source.weight(entry):
                    if name in writer:
                        writer.write(name, start, values)
                    matrices.add(name, start, values)
            for name, buffer in source.buffers.items():
                if name in writer:
                    writer.write(name, 0, buffer.reshape(-1))
        new.publish()
    notes = list(source.notes)
    if model is None:
        notes.append(
            "Names and layout are the module's own, and there is no config. Give `--model` with the config "
            "for a folder that `transformers` loads."
        )
    if source.trained.optimizer:
        notes.append("Moments and counters were left out: safetensors files hold only weights.")
    counts = len(names), source.elements, total
    return ConversionResult(source.kind, "safetensors files", target, *counts, tuple(notes))


def _select(
    source: ConvertSource, model: nn.Module | None, dtype: DType | None
) -> tuple[dict[str, SavedParameter], dict[str, Shape], dict[str, DType]]:
    """Return the parameters to be written by name, and the shapes and dtypes of all tensors."""
    names = {saved_name(entry.names, model): entry for entry in source.entries}
    shapes: dict[str, Shape] = {name: entry.shape for name, entry in names.items()}
    dtypes, plan, modules = {}, source.plan(), {} if model is None else dict(model.named_modules())
    for name, entry in names.items():
        # A plan's pin comes first, then the requested dtype, then the plan's, then the source's.
        row = None if plan is None else plan.row(entry.name)
        held = specify(entry.names, DType(entry.dtype), entry.shape, modules)
        dtypes[name] = exported_as(dtype, held, None if row is None else row.columns)
    hidden = non_persistent_buffers(model) if model is not None else ()
    known: Collection[str] = source.buffers if model is None else dict(model.named_buffers())
    for name, buffer in source.buffers.items():
        if name in known and name not in hidden:
            shapes[name], dtypes[name] = tuple(buffer.shape), dtype_of(buffer.dtype, "buffer")
    return names, shapes, dtypes


def to_checkpoint(source: ConvertSource, target: Path, shown: bool = False) -> ConversionResult:
    """Write a source as a zerodrift checkpoint, into a folder that holds none yet."""
    folder, tag = checkpoint.CheckpointFolder(target), checkpoint.automatic(source.trained.step)

    def check() -> None:
        if tags := folder.tags():
            got, do = ", ".join(tags[:5]), "Choose another folder."
            raise CheckpointError(folder.path, "must hold no checkpoint yet", got=got, do=do)

    with checkpoint.writing(target), folder.begin(tag, check) as new:
        size = _write_checkpoint(source, new.path, tag, shown)
        home = folder.publish(new)
    notes = list(source.notes)
    if not source.trained.optimizer:
        again = "load it with `allow=('optimizer',)`, and moments begin at zero"
        notes.append(f"There is no optimizer state: {again}.")
    counts = len(source.entries), source.elements, size
    return ConversionResult(source.kind, "a zerodrift checkpoint", home, *counts, tuple(notes))


def _write_checkpoint(source: ConvertSource, path: Path, tag: str, shown: bool) -> int:
    trained, entries = source.trained, tuple(map(_as_fp32, source.entries))
    total = 4 * sum((1 + len(e.moments)) * math.prod(e.shape) for e in entries)
    shared = {
        "global_steps": trained.step,
        "skipped_steps": trained.skipped,
        "scaler": None if trained.scaler is None else dict(trained.scaler),
        "schedule": trained.schedule_state if trained.schedule else None,
        "groups": [dict(group) for group in trained.groups],
        "counters": {"": {"steps": trained.updates}} if trained.optimizer else {},
        "buffers": {name: buffer.detach().clone() for name, buffer in source.buffers.items()},
        "alike": True,
    }
    own_state = {"random": None, "client": trained.client, "modules": {}, "buffers": {}}
    own = checkpoint.packed(own_state, "client")
    manifest = Manifest(
        run=uuid.uuid4().hex,
        tag=tag,
        step=trained.step,
        skipped=trained.skipped,
        saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=checkpoint.VERSIONS,
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
    )
    head = checkpoint.Head(manifest, entries, None, checkpoint.packed(shared, "schedule"))
    with closing(ProgressBar(f"writing {path.parent}", total, shown)) as bar:
        chunks, sums = checkpoint.write_rank_files(path, 0, _items(source, bar), own)
    return checkpoint.write_head(path, head, 1, chunks, sums).bytes


def _as_fp32(entry: SavedParameter) -> SavedParameter:
    """Return the entry of a parameter whose weights are widened to fp32, if fp32 holds their values."""
    held = DType(entry.dtype)
    return replace(entry, dtype="fp32") if held.is_floating and DType.FP32.holds(held) else entry


def _items(source: ConvertSource, bar: Callable[[int], None]) -> Iterator[checkpoint.Item]:
    for entry in source.entries:
        numel, dtype = math.prod(entry.shape), DType(_as_fp32(entry).dtype).torch
        for start, values in source.weight(entry):
            yield checkpoint.Item(checkpoint.weight_key(entry.name), numel, start, values.detach().to(dtype))
            bar(4 * values.numel())
        for key in entry.moments:
            for start, values in source.moment(entry, key):
                name = checkpoint.moment_key(key, entry.name)
                yield checkpoint.Item(name, numel, start, values.detach().float())
                bar(4 * values.numel())
