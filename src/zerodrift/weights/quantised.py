"""Tensors that a checkpoint holds as codes with scales: found by their names, and decoded in fp32.

The files of three libraries are known. bitsandbytes: NF4 in flat blocks, whose scales may be codes too.
DeepSeek: fp8 with a scale for each tile of 128x128. compressed-tensors: fp8 or int8 with a scale for a
tensor, its rows, or groups in them. Whatever else comes with a scale is refused by name.

Invariant: a value is `number * scale` in fp32, as the library that wrote it decodes it, and is never rounded
to 16 bits on the way. Codes that a narrow storage can hold as they are keep every bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zerodrift.dtypes import NARROW, Block, DType, Element, Format
from zerodrift.errors import Problems
from zerodrift.kernels import PackedRun, narrow
from zerodrift.model import StoredTensor
from zerodrift.weights.boxes import Box, simplified
from zerodrift.weights.reader import SafetensorsReader, spans

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

    def read(
        self, reader: SafetensorsReader, box: Box, out: torch.Tensor, first: int, steps: bool = False
    ) -> None:
        """Decode one box of the tensor into flat `out`, which begins at element `first` of the target. With
        `steps` it is how far a value may have been from what it was rounded to, instead."""
        for part in spans(simplified(box), 4):
            codes = self._codes(reader, part.origin, part.span)
            if steps:
                values = narrow.half_steps(self.form.element)[codes.int()] * (1 + 2**-8)
            else:
                values = narrow.reference_decode(self.form, codes[None], torch.ones(1))[0]
            scales = self._scales(reader, torch.arange(part.origin, part.origin + part.span))
            values *= scales.abs() if steps else scales
            part.of_target(out, first).copy_(part.of_source(values, part.origin))

    def fill(self, reader: SafetensorsReader, origin: int, run: PackedRun, start: int, count: int) -> None:
        """Copy the codes of so many elements from `origin` on, and the scales of their blocks."""
        for first in range(0, count, 1 << 19):
            numel = min(1 << 19, count - first)
            codes = self._codes(reader, origin + first, numel)
            codes = torch.nn.functional.pad(codes, (0, -numel % run.block))
            part = PackedRun.empty(run.dtype, codes.numel())
            part.codes.copy_(narrow.pack(self.form.element, codes).view_as(part.codes))
            begins = torch.arange(origin + first, origin + first + numel, run.block)
            part.scales.copy_(self._scales(reader, begins).view(torch.uint8).view_as(part.scales))
            run.copy(start + first, part)

    def has_whole_blocks(self, boxes: Sequence[Box]) -> bool:
        """Return True if a parameter has elements in the order of the file, from a block of each on."""
        return all(box.is_run and box.start % 256 == box.origin % 256 == 0 for box in map(simplified, boxes))

    def _codes(self, reader: SafetensorsReader, first: int, count: int) -> torch.Tensor:
        if self.form.element.bits == 8:
            return reader.staged(self.codes, first, count).view(torch.uint8)
        low, high = first // 2, -(-(first + count) // 2)
        codes = narrow.unpack(self.form.element, reader.staged(self.codes, low, high - low))
        return codes[first - 2 * low :][:count]

    def _scales(self, reader: SafetensorsReader, elements: torch.Tensor) -> torch.Tensor:
        """Return the scales of ascending elements. fp32."""
        index = self._blocks(elements)
        low, high = int(index[0]), int(index[-1]) + 1
        if isinstance(self.form.block, tuple):  # tiles of a row are not in the order of its elements
            low, high = int(index.min()), int(index.max()) + 1
        scales = reader.staged(self.scales, low, high - low).clone()
        if self.nested is not None:
            nested, blocks = self.nested, torch.arange(low, high) // self.nested.block
            table = reader.staged(nested.map, 0, 256).clone()
            outer = reader.staged(nested.scales, int(blocks[0]), int(blocks[-1] - blocks[0]) + 1).clone()
            scales = table[scales.int()] * outer[blocks - blocks[0]] + torch.tensor(nested.offset)
        return scales.float()[index - low]

    def _blocks(self, elements: torch.Tensor) -> torch.Tensor:
        block, columns = self.form.block, self.shape[-1]
        if isinstance(block, int):
            return elements // block
        if block == "tensor":
            return torch.zeros_like(elements)
        rows, at = elements // columns, elements % columns
        if block == "row":
            return rows
        tall, wide = block
        height = self.shape[-2] if len(self.shape) > 1 else 1
        down, across = -(-height // tall), -(-columns // wide)
        return (rows // height * down + rows % height // tall) * across + at // wide


def find_quantised(
    tensors: tuple[StoredTensor, ...], wanted: Sequence[str], reader: SafetensorsReader, problems: Problems
) -> tuple[tuple[StoredTensor, ...], dict[str, QuantisedTensor]]:
    """Return the tensors as if they were decoded, without their scales, and those that are quantised by name.
    Scales that the model itself wants stay tensors of their own."""
    known, names = {tensor.name: tensor for tensor in tensors}, frozenset(wanted)
    found: dict[str, QuantisedTensor] = {}
    used: set[str] = set()
    for tensor in tensors:
        states = (name for name in known if name.startswith(f"{tensor.name}{_STATE}"))
        state = next(states, "") if tensor.dtype is DType.UINT8 else ""
        scale = "" if state or tensor.dtype not in _ELEMENTS else _scale_of(tensor, known)
        if state:
            quantised, companions = _bitsandbytes(tensor, known, state, reader, problems)
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
    tensor: StoredTensor,
    known: Mapping[str, StoredTensor],
    state: str,
    reader: SafetensorsReader,
    problems: Problems,
) -> tuple[QuantisedTensor | None, set[str]]:
    """Read what bitsandbytes writes: codes, `absmax`, `quant_map` and a state in JSON, perhaps nested."""
    ends = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    parts = {end: known[name] for end in ends if (name := f"{tensor.name}.{end}") in known}
    companions = {state, *(part.name for part in parts.values())}
    text = bytes(reader.staged(known[state], 0, math.prod(known[state].shape)).tolist())
    try:
        saved = json.loads(text)
        shape = tuple(int(size) for size in saved["shape"])
        block, kind = int(saved["blocksize"]), str(saved["quant_type"])
        table = reader.staged(parts["quant_map"], 0, 16).tolist()
        nested = None
        if "nested_absmax" in parts:
            inner = int(saved["nested_blocksize"]), float(saved["nested_offset"])
            nested = NestedScales(parts["nested_quant_map"], parts["nested_absmax"], *inner)
        absmax = parts["absmax"]
    except (ValueError, KeyError, TypeError) as error:
        must, got = "must have the state that bitsandbytes writes", f"`{state}` without {error}"
        problems.add(tensor.name, must, got=got, do="Save it again.")
        return None, companions
    if kind != "nf4" or table != list(narrow.NF4):
        must = "must be NF4, with the numbers of its definition"
        do = "Load it with bitsandbytes, decode it and save it."
        problems.add(tensor.name, must, got=f"{kind} of bitsandbytes", do=do)
        return None, companions
    blocks = -(-math.prod(shape) // block)
    codes = -(-math.prod(shape) // 2)
    if math.prod(absmax.shape) != blocks or math.prod(tensor.shape) != codes:
        must, got = f"must have codes for {list(shape)} and {blocks:,} scales", f"{list(absmax.shape)} scales"
        problems.add(tensor.name, must, got=got, do="Save it again.")
        return None, companions
    return QuantisedTensor(tensor, absmax, Format(Element.NF4, block), shape, nested), companions
