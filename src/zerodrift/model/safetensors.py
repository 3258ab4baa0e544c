"""Describe a model by the headers of its safetensors files: one file, an index, or a folder with either.

Tensors are in natural order of their names' components, so `layers.2` comes before `layers.10`. Headers have
neither classes, nor ties, nor buffers: every tensor but scales of others is a parameter, floating ones are
trained, and `OwningModule.klass` is empty. `model/header.py` checks each file, and `model/quantised.py` finds
codes and their scales.

Invariant: every tensor is in exactly one file, and an index, if there is one, names that file.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from reprlib import repr as shown

from zerodrift.dtypes import DType
from zerodrift.errors import ModelError, Problems
from zerodrift.model.document import listed, read
from zerodrift.model.header import StoredTensor, read_header
from zerodrift.model.quantised import find_quantised
from zerodrift.model.spec import ModelSpec, OwningModule, ParameterSpec

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_PREFERRED = ("model" + SUFFIX, "model" + INDEX_SUFFIX)
"""The files that `transformers` prefers in a folder with several, in its order."""


def from_safetensors(path: str | os.PathLike[str]) -> ModelSpec:
    """Describe the model of a `.safetensors` file, an index, or a folder of either.

    A tensor that is stored as codes with scales has the shape and dtype that it is decoded to.
    """
    tensors, checkpoint, formats = stored_as(list_tensors(path))
    parameters = tuple(
        ParameterSpec(
            names=(tensor.name,),
            shape=tensor.shape,
            dtype=tensor.dtype,
            owners=(OwningModule(tensor.name.rpartition(".")[0], ""),),
            trained=tensor.dtype.is_floating,
        )
        for tensor in tensors
    )
    return ModelSpec(str(path), parameters, checkpoint=checkpoint, formats=formats)


def stored_as(
    tensors: tuple[StoredTensor, ...], wanted: Sequence[str] = ()
) -> tuple[tuple[StoredTensor, ...], tuple[tuple[str, DType], ...], tuple[tuple[str, str], ...]]:
    """Return the tensors without the scales of others, and `ModelSpec.checkpoint` and `ModelSpec.formats`.

    Scales in `wanted`, the names of a model, stay tensors of their own.
    """
    problems = Problems()
    plain, coded = find_quantised(tensors, wanted, problems)
    problems.raise_as(ModelError)
    checkpoint = tuple((t.name, coded[t.name].dtype if t.name in coded else t.dtype) for t in plain)
    return plain, checkpoint, tuple((name, tensor.describe()) for name, tensor in coded.items())


def list_tensors(path: str | os.PathLike[str]) -> tuple[StoredTensor, ...]:
    """List the tensors of a checkpoint with the places of their bytes, in natural order."""
    problems = Problems()
    chosen = _choose(Path(path).expanduser(), problems)
    tensors: list[StoredTensor] = []
    if chosen is not None and chosen.name.endswith(INDEX_SUFFIX):
        tensors = _indexed(chosen, problems)
    elif chosen is not None:
        for file in sorted(chosen.glob("*" + SUFFIX)) if chosen.is_dir() else [chosen]:
            header = read_header(file, problems)
            tensors += header[1] if header is not None else ()
    _check_once(tensors, problems)
    problems.raise_as(ModelError)
    tensors.sort(key=lambda tensor: natural(tensor.name))
    return tuple(tensors)


def holds(folder: Path) -> bool:
    """Return True if a folder has safetensors files or an index of them."""
    return any(entry.name.endswith((SUFFIX, INDEX_SUFFIX)) for entry in folder.iterdir())


def natural(name: str) -> tuple[list[tuple[tuple[bool, int, str], ...]], str]:
    """Return a sort key that compares component by component, digits by value and before letters."""
    return [_component(component) for component in name.split(".")], name


@functools.lru_cache(maxsize=4096)
def _component(text: str) -> tuple[tuple[bool, int, str], ...]:
    # Cached, since the 46,000 names of a large model are made of a few hundred components. Python converts
    # at most 4,300 digits to an int.
    runs = re.findall(r"([0-9]{1,4000})|([^0-9]+)", text)
    return tuple((letters != "", int(digits or 0), letters) for digits, letters in runs)


def _choose(path: Path, problems: Problems) -> Path | None:
    do = ""
    if path.is_file():
        if path.name.endswith((SUFFIX, INDEX_SUFFIX)):
            return path
        must, got = f"must end in `{SUFFIX}` or `{INDEX_SUFFIX}`", repr(path.name)
    elif not path.exists():
        must, got = "must exist", "no such file or folder"
    else:
        for name in _PREFERRED:
            if (path / name).is_file():
                return path / name
        indexes = sorted(path.glob("*" + INDEX_SUFFIX))
        if len(indexes) > 1:
            must, got = "must hold one index", listed([index.name for index in indexes])
            do = "Give the index that you mean."
        elif indexes or any(path.glob("*" + SUFFIX)):
            return indexes[0] if indexes else path
        else:
            must, got = "must hold safetensors files", "a folder without any"
    problems.add(str(path), must, got=got, do=do)
    return None


def _indexed(index: Path, problems: Problems) -> list[StoredTensor]:
    promised = _promised(index, problems)
    tensors: list[StoredTensor] = []
    for shard, names in promised.items():
        file = index.parent / shard
        if not file.is_file():
            got = f"no such file, and {len(names)} tensors are to be in it"
            todo = "Copy or download it; to go without weights, give `config.json` itself."
            problems.add(str(file), f"must exist, as `{index.name}` names it", got=got, do=todo)
            continue
        header = read_header(file, problems)
        if header is None:
            continue
        held, stored_tensors = header
        tensors += stored_tensors
        if lacking := [name for name in names if name not in held]:
            problems.add(str(file), f"must hold what `{index.name}` says", got=f"no {listed(lacking)}")
        if extra := sorted(held - names.keys(), key=natural):
            problems.add(str(index), f"must list every tensor of `{shard}`", got=f"no {listed(extra)}")
    return tensors


def _promised(index: Path, problems: Problems) -> dict[str, dict[str, None]]:
    """Map each shard to the names that the index puts there, in the index's order."""
    document = read(index, problems)
    if document is None:
        return {}
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict):
        must = "must have `weight_map`, an object of tensor name to file name"
        problems.add(str(index), must, got="no such key" if weight_map is None else type(weight_map).__name__)
        return {}
    promised: dict[str, dict[str, None]] = {}
    for name, shard in weight_map.items():
        # A value that is no string is kept as its text, which is refused below.
        promised.setdefault(shard if isinstance(shard, str) else shown(shard), {})[name] = None
    for shard, names in list(promised.items()):
        inside = PurePosixPath(shard)
        if not shard.endswith(SUFFIX) or inside.is_absolute() or ".." in inside.parts:
            must = f"must name a `{SUFFIX}` file beside it for every tensor"
            problems.add(str(index), must, got=f"{shown(shard)} for {listed(list(names))}")
            del promised[shard]
    return promised


def _check_once(tensors: list[StoredTensor], problems: Problems) -> None:
    first: dict[str, Path] = {}
    twice: dict[tuple[Path, Path], list[str]] = {}
    for tensor in tensors:
        file = first.setdefault(tensor.name, tensor.file)
        if file != tensor.file:
            twice.setdefault((file, tensor.file), []).append(tensor.name)
    for (file, other), names in twice.items():
        todo = "Keep them in one file, or give the file that you mean."
        problems.add(str(other), f"must not repeat tensors of `{file.name}`", got=listed(names), do=todo)
