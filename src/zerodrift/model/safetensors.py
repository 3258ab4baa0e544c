"""Describe a model by the headers of its safetensors files: one file, an index, or a folder with either.

Tensors are in natural order of their names' components, so `layers.2` comes before `layers.10`. Headers have
neither classes, nor ties, nor buffers: every tensor but scales of others is a parameter, floating ones are
trained, and `OwningModule.klass` is empty. Codes with scales are found by the names that bitsandbytes (NF4),
DeepSeek (fp8 in tiles of 128x128) and compressed-tensors (fp8 or int8) give them; whatever else comes with a
scale is refused by name. `weights/quantised.py` decodes them.

Invariant: every tensor is in exactly one file, and an index, if there is one, names that file. A tensor of
codes has codes for its shape and a scale for each of its blocks.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from reprlib import repr as shown

from zerodrift.dtypes import NARROW, NF4, Block, DType, Element, Format
from zerodrift.errors import ModelError, Problems
from zerodrift.files import opened
from zerodrift.model.document import StoredTensor, listed, read, read_header
from zerodrift.model.spec import ModelSpec, OwningModule, ParameterSpec

TILE = 128
"""Side of DeepSeek's tiles."""
_STATE = ".quant_state.bitsandbytes__"
_ELEMENTS = {DType.FP8_E4M3: Element.E4M3, DType.FP8_E5M2: Element.E5M2, DType.INT8: Element.INT8}


@dataclass(frozen=True, slots=True)
class NestedScales:
    """How bitsandbytes quantises its scales: `map[code] * scale + offset`."""

    map: StoredTensor
    scales: StoredTensor
    block: int
    offset: float


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """The codes and scales of a tensor. With `nested`, the scales are codes themselves."""

    codes: StoredTensor
    scales: StoredTensor
    form: Format
    shape: tuple[int, ...]
    nested: NestedScales | None = None

    @property
    def dtype(self) -> DType:
        """The narrow format of the tensor; fp32 for a format without a name here."""
        own = self.form.element, self.form.block
        known = {(form.element, form.block): d for d, form in NARROW.items() if form.scale == "fp32"}
        return known.get(own, DType.FP32)

    @property
    def stored(self) -> str:
        """Name of the element type in the files."""
        return "nf4" if self.form.element is Element.NF4 else str(self.codes.dtype)

    def describe(self) -> str:
        """Return the format of the files as a phrase."""
        return self.form.describe() + (", itself in codes" if self.nested is not None else "")


def find_quantised(
    tensors: tuple[StoredTensor, ...], wanted: Sequence[str], problems: Problems
) -> tuple[tuple[StoredTensor, ...], dict[str, QuantisedTensor]]:
    """Return the tensors without scales, with the shapes and dtypes of decoded values, and the quantised ones
    by name.

    Scales in `wanted`, the names of a model, stay tensors of their own.
    """
    known, names = {tensor.name: tensor for tensor in tensors}, frozenset(wanted)
    found: dict[str, QuantisedTensor] = {}
    used: set[str] = set()
    for tensor in tensors:
        states = (name for name in known if name.startswith(f"{tensor.name}{_STATE}"))
        state = next(states, "") if tensor.dtype is DType.UINT8 else ""
        scale = "" if state or tensor.dtype not in _ELEMENTS else _scale_of(tensor, known)
        if state:
            used |= {state, *(f"{tensor.name}.{end}" for end in _BESIDE)}
        elif scale and scale not in names:
            used |= {scale, f"{tensor.name}_zero_point"}
        else:
            continue
        try:
            read = _bitsandbytes(tensor, known, state) if state else _scaled(tensor, known, known[scale])
            found[tensor.name] = read
        except ModelError as error:
            problems.include(*error.problems)
    plain = (
        replace(tensor, shape=found[tensor.name].shape, dtype=DType.FP32) if tensor.name in found else tensor
        for tensor in tensors
        if tensor.name not in used
    )
    return tuple(plain), found


def _scale_of(stored: StoredTensor, known: Mapping[str, StoredTensor]) -> str:
    """Return the name of a quantised tensor's scale, out of the usual names; empty if there is none."""
    stem = stored.name.removesuffix(".weight")
    likely = [f"{stored.name}{end}" for end in ("_scale_inv", "_scale", ".scale", "_scales")]
    likely += [f"{stem}.{end}" for end in ("weight_scale", "weight_scale_inv", "scale", "scales")]
    return next((name for name in likely if name in known), "")


def _scaled(tensor: StoredTensor, known: Mapping[str, StoredTensor], scale: StoredTensor) -> QuantisedTensor:
    """Read the format of DeepSeek and compressed-tensors: `weight` and one tensor of scales."""
    point = f"{tensor.name}_zero_point"
    if point in known:
        must = "must be stored without a zero point: its zero would not be a zero here"
        do = "Quantise it symmetrically, or decode it first."
        raise ModelError(tensor.name, must, got=f"`{point}`", do=do)
    block = _block_of(tensor.shape, scale)
    if block is None or scale.dtype not in (DType.FP32, DType.BF16, DType.FP16):
        must = "must have a floating scale for all of it, or for rows, groups in rows or tiles"
        got = f"{scale.dtype} {list(scale.shape)} in `{scale.name}` for {list(tensor.shape)}"
        raise ModelError(tensor.name, must, got=got, do="Decode the checkpoint first.")
    return QuantisedTensor(tensor, scale, Format(_ELEMENTS[tensor.dtype], block), tensor.shape)


def _block_of(shape: tuple[int, ...], scale: StoredTensor) -> Block | None:
    """Return the block of a scale by its shape."""
    numel = math.prod(scale.shape)
    if numel == 1:
        return "tensor"
    if len(shape) < 2 or not math.prod(shape):
        return None
    rows, columns = shape[-2:]
    stacks = math.prod(shape[:-2])
    tiles = -(-rows // TILE), -(-columns // TILE)
    if scale.shape[-2:] == tiles and numel == stacks * math.prod(tiles):
        return TILE, TILE
    if numel == stacks * rows and scale.shape[-1] in (1, rows):
        return "row"
    groups = scale.shape[-1]
    if len(scale.shape) > 1 and numel == stacks * rows * groups and columns % groups == 0:
        return 1, columns // groups
    return None


_BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def _bitsandbytes(tensor: StoredTensor, known: Mapping[str, StoredTensor], state: str) -> QuantisedTensor:
    """Read the format of bitsandbytes: codes, `absmax`, `quant_map` and a state in JSON, perhaps nested."""
    parts = {end: known[name] for end in _BESIDE if (name := f"{tensor.name}.{end}") in known}
    try:
        saved = json.loads(_bytes(known[state]))
        shape = tuple(int(size) for size in saved["shape"])
        block, kind = int(saved["blocksize"]), str(saved["quant_type"])
        table = struct.unpack("<16f", _bytes(parts["quant_map"]))
        nested = None
        if "nested_absmax" in parts:
            inner = int(saved["nested_blocksize"]), float(saved["nested_offset"])
            nested = NestedScales(parts["nested_quant_map"], parts["nested_absmax"], *inner)
        absmax = parts["absmax"]
    except (ValueError, KeyError, TypeError, struct.error) as error:
        must, got = "must have the state that bitsandbytes writes", f"`{state}` without {error}"
        raise ModelError(tensor.name, must, got=got, do="Save it again.") from error
    if kind != "nf4" or table != NF4:
        must = "must be NF4, with the numbers of its definition"
        do = "Load it with bitsandbytes, decode it and save it."
        raise ModelError(tensor.name, must, got=f"{kind} of bitsandbytes", do=do)
    numel = math.prod(shape)
    blocks = -(-numel // block)
    if math.prod(absmax.shape) != blocks or math.prod(tensor.shape) != -(-numel // 2):
        must, got = f"must have codes for {list(shape)} and {blocks:,} scales", f"{list(absmax.shape)} scales"
        raise ModelError(tensor.name, must, got=got, do="Save it again.")
    return QuantisedTensor(tensor, absmax, Format(Element.NF4, block), shape, nested)


def _bytes(tensor: StoredTensor) -> bytes:
    """Read a small tensor."""
    with opened(tensor.file) as file:
        file.seek(tensor.start)
        return file.read(tensor.stop - tensor.start)


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
            problems.add(
                str(file), f"must hold the tensors that `{index.name}` lists", got=f"no {listed(lacking)}"
            )
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
