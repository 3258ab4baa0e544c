"""Tensors that a checkpoint holds as codes with scales: found by their names, with their formats.

The files of three libraries are known. bitsandbytes: NF4 in flat blocks, whose scales may be codes too.
DeepSeek: fp8 with a scale for each tile of 128x128. compressed-tensors: fp8 or int8 with a scale for a
tensor, its rows, or groups in them. Whatever else comes with a scale is refused by name.
`weights/quantised.py` decodes them.

Invariant: a tensor that is found has codes for its shape and a scale for each of its blocks.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zerodrift.dtypes import NARROW, NF4, Block, DType, Element, Format
from zerodrift.errors import Problems
from zerodrift.files import opened
from zerodrift.model.header import StoredTensor

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
    """The codes of a tensor, and its scales in fp32 or what makes them."""

    codes: StoredTensor
    scales: StoredTensor
    form: Format
    shape: tuple[int, ...]
    nested: NestedScales | None = None

    @property
    def dtype(self) -> DType:
        """The narrow format that the tensor is in; fp32 if it has no name here."""
        own = self.form.element, self.form.block
        known = {(form.element, form.block): d for d, form in NARROW.items() if form.scale == "fp32"}
        return known.get(own, DType.FP32)

    @property
    def stored(self) -> str:
        """The element in the files, in a word."""
        return "nf4" if self.form.element is Element.NF4 else str(self.codes.dtype)

    def describe(self) -> str:
        """Return the format of the files as a phrase."""
        return self.form.describe() + (", itself in codes" if self.nested is not None else "")


def find_quantised(
    tensors: tuple[StoredTensor, ...], wanted: Sequence[str], problems: Problems
) -> tuple[tuple[StoredTensor, ...], dict[str, QuantisedTensor]]:
    """Return the tensors as if they were decoded, without their scales, and those that are quantised by name.

    Scales that the model itself wants stay tensors of their own.
    """
    known, names = {tensor.name: tensor for tensor in tensors}, frozenset(wanted)
    found: dict[str, QuantisedTensor] = {}
    used: set[str] = set()
    for tensor in tensors:
        states = (name for name in known if name.startswith(f"{tensor.name}{_STATE}"))
        state = next(states, "") if tensor.dtype is DType.UINT8 else ""
        scale = "" if state or tensor.dtype not in _ELEMENTS else _scale_of(tensor, known)
        if state:
            quantised, companions = _bitsandbytes(tensor, known, state, problems)
        elif scale and scale not in names:
            quantised, companions = _scaled(tensor, known, known[scale], problems)
        else:
            continue
        used |= companions
        if quantised is not None:
            found[tensor.name] = quantised
    plain = (
        replace(tensor, shape=found[tensor.name].shape, dtype=DType.FP32) if tensor.name in found else tensor
        for tensor in tensors
        if tensor.name not in used
    )
    return tuple(plain), found


def _scale_of(stored: StoredTensor, known: Mapping[str, StoredTensor]) -> str:
    """Return the name of a quantised tensor's scale, by the usual names for it; empty if there is none."""
    stem = stored.name.removesuffix(".weight")
    likely = [f"{stored.name}{end}" for end in ("_scale_inv", "_scale", ".scale", "_scales")]
    likely += [f"{stem}.{end}" for end in ("weight_scale", "weight_scale_inv", "scale", "scales")]
    return next((name for name in likely if name in known), "")


def _scaled(
    tensor: StoredTensor, known: Mapping[str, StoredTensor], scale: StoredTensor, problems: Problems
) -> tuple[QuantisedTensor | None, set[str]]:
    """Read what DeepSeek and compressed-tensors write: `weight` and one scale."""
    companions = {scale.name}
    point = f"{tensor.name}_zero_point"
    if point in known:
        must = "must be stored without a zero point: its zero would not be a zero here"
        problems.add(tensor.name, must, got=f"`{point}`", do="Quantise it symmetrically, or decode it first.")
        return None, companions | {point}
    block = _block_of(tensor.shape, scale)
    if block is None or scale.dtype not in (DType.FP32, DType.BF16, DType.FP16):
        must = "must have a floating scale for all of it, or for rows, groups in rows or tiles"
        got = f"{scale.dtype} {list(scale.shape)} in `{scale.name}` for {list(tensor.shape)}"
        problems.add(tensor.name, must, got=got, do="Decode the checkpoint first.")
        return None, companions
    form = Format(_ELEMENTS[tensor.dtype], block)
    return QuantisedTensor(tensor, scale, form, tensor.shape), companions


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
    if len(scale.shape) < 2 or math.prod(scale.shape[:-2]) != stacks:
        return None
    # Other tiles have powers of two as sides, and may be cut at the edges.
    tall, wide = (
        1 << (-(-size // count) - 1).bit_length()
        for size, count in zip(shape[-2:], scale.shape[-2:], strict=True)
    )
    return (tall, wide) if scale.shape[-2:] == (-(-rows // tall), -(-columns // wide)) else None


def _bitsandbytes(
    tensor: StoredTensor, known: Mapping[str, StoredTensor], state: str, problems: Problems
) -> tuple[QuantisedTensor | None, set[str]]:
    """Read what bitsandbytes writes: codes, `absmax`, `quant_map` and a state in JSON, perhaps nested."""
    ends = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    parts = {end: known[name] for end in ends if (name := f"{tensor.name}.{end}") in known}
    companions = {state, *(part.name for part in parts.values())}
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
        problems.add(tensor.name, must, got=got, do="Save it again.")
        return None, companions
    if kind != "nf4" or table != NF4:
        must = "must be NF4, with the numbers of its definition"
        do = "Load it with bitsandbytes, decode it and save it."
        problems.add(tensor.name, must, got=f"{kind} of bitsandbytes", do=do)
        return None, companions
    blocks = -(-math.prod(shape) // block)
    if (
        math.prod(absmax.shape) != blocks
        or 2 * math.prod(tensor.shape) != math.prod(shape) + math.prod(shape) % 2
    ):
        must, got = f"must have codes for {list(shape)} and {blocks:,} scales", f"{list(absmax.shape)} scales"
        problems.add(tensor.name, must, got=got, do="Save it again.")
        return None, companions
    return QuantisedTensor(tensor, absmax, Format(Element.NF4, block), shape, nested), companions


def _bytes(tensor: StoredTensor) -> bytes:
    """Read a small tensor."""
    with opened(tensor.file) as file:
        file.seek(tensor.start)
        return file.read(tensor.stop - tensor.start)
