"""Read tensors that files hold as codes with scales, and write them for other libraries.

`model/safetensors.py` finds the tensors. A value is decoded as the library that wrote it does, as
`number * scale` in fp32, and is never rounded to 16 bits on the way. Codes in the format of a narrow storage
are copied bit by bit.

An export writes the tensors that a library reads for each matrix, and the block of config.json that names the
format: DeepSeek's tiles for `transformers` and servers, rows in fp8 or int8 for compressed-tensors, NF4 for
bitsandbytes. A matrix is encoded as a whole from fp32 values, so its bits do not depend on ranks or stage.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zerodrift.dtypes import NF4, DType, Element, Format
from zerodrift.errors import ConfigError, Problems
from zerodrift.kernels import PackedRun, narrow
from zerodrift.model import QuantisedTensor
from zerodrift.policy import cut_tiles
from zerodrift.weights.boxes import Box, Shape, simplified, within
from zerodrift.weights.reader import SafetensorsReader, spans
from zerodrift.weights.writer import SafetensorsWriter, SavedTensor


def decode_quantised(
    tensor: QuantisedTensor,
    reader: SafetensorsReader,
    box: Box,
    out: torch.Tensor,
    first: int,
    steps: bool = False,
) -> None:
    """Decode one box of the tensor into flat `out`, which begins at element `first` of the target.

    With `steps`, fill `out` with the largest rounding error that each value may have, instead of the values.
    """
    for part in spans(simplified(box), 4):
        codes = _codes(tensor, reader, part.origin, part.span)
        if steps:
            values = narrow.half_steps(tensor.form.element)[codes.int()] * (1 + 2**-8)
        else:
            values = narrow.reference_decode(tensor.form, codes[None], torch.ones(1, device="cpu"))[0]
        elements = torch.arange(part.origin, part.origin + part.span, device="cpu")
        scales = _scales(tensor, reader, elements)
        values *= scales.abs() if steps else scales
        part.of_target(out, first).copy_(part.of_source(values, part.origin))


def copy_codes(
    tensor: QuantisedTensor, reader: SafetensorsReader, origin: int, run: PackedRun, start: int, count: int
) -> None:
    """Copy the codes of `count` elements from `origin` on, and the scales of their blocks."""
    for first in range(0, count, 1 << 19):
        numel = min(1 << 19, count - first)
        codes = _codes(tensor, reader, origin + first, numel)
        codes = torch.nn.functional.pad(codes, (0, -numel % run.block))
        part = PackedRun.empty(run.dtype, codes.numel(), codes.device)
        part.codes.copy_(narrow.pack(tensor.form.element, codes).view_as(part.codes))
        begins = torch.arange(origin + first, origin + first + numel, run.block, device="cpu")
        part.scales.copy_(_scales(tensor, reader, begins).view(torch.uint8).view_as(part.scales))
        run.copy(start + first, part)


def has_whole_blocks(boxes: Sequence[Box]) -> bool:
    """Return True if every box is one run that begins with a block, in the file and in the parameter."""
    return all(box.is_run and box.start % 256 == box.origin % 256 == 0 for box in map(simplified, boxes))


def _codes(tensor: QuantisedTensor, reader: SafetensorsReader, first: int, count: int) -> torch.Tensor:
    if tensor.form.element.bits == 8:
        return reader.staged(tensor.codes, first, count).view(torch.uint8)
    low, high = first // 2, -(-(first + count) // 2)
    codes = narrow.unpack(tensor.form.element, reader.staged(tensor.codes, low, high - low))
    return codes[first - 2 * low :][:count]


def _scales(tensor: QuantisedTensor, reader: SafetensorsReader, elements: torch.Tensor) -> torch.Tensor:
    """Return the scales of ascending elements. fp32."""
    index = _blocks(tensor, elements)  # tiles of a row are not in the order of its elements
    low, high = int(index.min()), int(index.max()) + 1
    scales = reader.staged(tensor.scales, low, high - low).clone()
    if tensor.nested is not None:
        nested = tensor.nested
        blocks = torch.arange(low, high, device="cpu") // nested.block
        table = reader.staged(nested.map, 0, 256).clone()
        outer = reader.staged(nested.scales, int(blocks[0]), int(blocks[-1] - blocks[0]) + 1).clone()
        scales = table[scales.int()] * outer[blocks - blocks[0]]
        scales += torch.tensor(nested.offset, device="cpu")
    return scales.float()[index - low]


def _blocks(tensor: QuantisedTensor, elements: torch.Tensor) -> torch.Tensor:
    block, columns = tensor.form.block, tensor.shape[-1]
    if isinstance(block, int):
        return elements // block
    if block == "tensor":
        return torch.zeros_like(elements)
    rows, at = elements // columns, elements % columns
    if block == "row":
        return rows
    tall, wide = block
    height = tensor.shape[-2] if len(tensor.shape) > 1 else 1
    down, across = -(-height // tall), -(-columns // wide)
    return (rows // height * down + rows % height // tall) * across + at // wide


# --- layouts of other libraries -----------------------------------------------------------------------------


WINDOW = 1 << 20
"""Approximate number of elements that are encoded at a time."""
_CODES = {Element.E4M3: DType.FP8_E4M3, Element.INT8: DType.INT8, Element.NF4: DType.UINT8}


@dataclass(frozen=True, slots=True)
class NarrowMatrix:
    """A matrix that is collected in fp32, and then encoded into codes and scales."""

    tensor: SavedTensor
    """Name, shape, narrow dtype and parts of the matrix."""
    plain: str
    """Dtype of decoded values in NF4's state, as torch writes it."""

    @property
    def form(self) -> Format:
        return narrow.form_of(self.tensor.dtype)

    def tensors(self) -> tuple[SavedTensor, ...]:
        """Return the tensors of the file: codes first, then scales, and what bitsandbytes adds."""
        name, (rows, columns), form = self.tensor.name, self.tensor.shape, self.form
        codes = SavedTensor(name, (rows, columns), _CODES[form.element], ())
        if form.block == "row":
            return codes, SavedTensor(f"{name}_scale", (rows, 1), DType.FP32, ())
        if not form.is_flat:
            tiles = -(-rows // 128), -(-columns // 128)
            return codes, SavedTensor(f"{name}_scale_inv", tiles, DType.FP32, ())
        return (
            replace(codes, shape=(-(-rows * columns // 2), 1)),
            SavedTensor(f"{name}.absmax", (form.blocks((rows, columns)),), DType.FP32, ()),
            SavedTensor(f"{name}.quant_map", (16,), DType.FP32, ()),
            SavedTensor(f"{name}.quant_state.bitsandbytes__nf4", (len(self._state()),), DType.UINT8, ()),
        )

    def collect(self, out: torch.Tensor, name: str, start: int, values: torch.Tensor) -> int:
        """Copy the elements of the matrix in a run of a parameter to their places, and count the elements.

        Shapes [elements of the matrix], fp32; [elements of the run].
        """
        count = 0
        for part in self.tensor.parts:
            if name == part.parameter:
                for box in within((part.box,), start, start + values.numel()):
                    box.of_source(out).copy_(box.of_target(values, start))
                    count += box.numel
        return count

    @torch.no_grad()
    def write(self, values: torch.Tensor, writer: SafetensorsWriter) -> None:
        """Encode the matrix and write its tensors. Shape [elements], fp32."""
        codes_to, scales_to, *others = (tensor.name for tensor in self.tensors())
        form, columns, placed = self.form, self.tensor.shape[1], 0
        band = WINDOW if form.is_flat else max(128, WINDOW // max(1, columns) // 128 * 128) * columns
        for first in range(0, values.numel(), band):
            part = values[first : first + band].cpu()
            shape = (part.numel(),) if form.is_flat else (part.numel() // columns, columns)
            blocks, scales = narrow.reference_encode(form, narrow.as_blocks(form, part, shape))
            codes = narrow.pack(form.element, blocks.view(-1)) if form.is_flat else blocks
            if form.is_flat:
                codes = codes[: -(-part.numel() // 2)]
            else:
                codes = narrow.from_blocks(form, codes, shape).reshape(-1)
            at = first * form.element.bits // 8
            writer.put(codes_to, at, codes.view(_CODES[form.element].torch))
            writer.put(scales_to, placed, scales)
            placed += scales.numel()
        if others:
            table_to, state_to = others
            writer.put(table_to, 0, torch.tensor(NF4))
            writer.put(state_to, 0, self._state())

    def _state(self) -> torch.Tensor:
        state = {"quant_type": "nf4", "blocksize": self.form.run, "dtype": self.plain}
        text = json.dumps({**state, "shape": list(self.tensor.shape)})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)


def find_matrices(
    saved: Sequence[SavedTensor], shapes: Mapping[str, Shape], plain: DType
) -> tuple[tuple[SavedTensor, ...], tuple[NarrowMatrix, ...]]:
    """Replace every narrow tensor by the tensors of its layout, and return the matrices to be encoded.

    `shapes` has the shapes of the parameters.
    """
    tensors: list[SavedTensor] = []
    found: list[NarrowMatrix] = []
    problems = Problems()
    for tensor in saved:
        if tensor.dtype.format is None:
            tensors.append(tensor)
            continue
        cut = cut_tiles(tensor.shape) if tensor.dtype is DType.FP8_128X128 else ""
        if any(shapes[part.parameter] == tensor.shape for part in tensor.parts):
            cut = ""  # the plan has judged a parameter that is this matrix
        if len(tensor.shape) != 2 or cut:
            must = f"must be a matrix in the files that libraries read in {tensor.dtype}"
            do = "Give its parameter a rule with a plain `export`."
            problems.add(tensor.name, must, got=cut or f"shape {list(tensor.shape)}", do=do)
            continue
        found.append(NarrowMatrix(tensor, str(plain.torch).removeprefix("torch.")))
        tensors += found[-1].tensors()
    kinds = sorted({str(matrix.tensor.dtype) for matrix in found})
    if len(kinds) > 1:
        must = "must leave one narrow format in a folder, whose config.json names one"
        problems.add("dtype", must, got=" and ".join(kinds))
    problems.raise_as(ConfigError, "export")
    return tuple(tensors), tuple(found)


class MatrixCollector:
    """Collects matrices from runs of parameters in any order, and writes each when it is complete."""

    def __init__(self, matrices: Sequence[NarrowMatrix], writer: SafetensorsWriter) -> None:
        self._writer = writer
        self._of: dict[str, list[NarrowMatrix]] = {}
        self._open: dict[str, tuple[torch.Tensor, int]] = {}
        """Name of a matrix -> (values, elements that are missing)."""
        for matrix in matrices:
            for name in dict.fromkeys(part.parameter for part in matrix.tensor.parts):
                self._of.setdefault(name, []).append(matrix)

    def add(self, name: str, start: int, values: torch.Tensor) -> None:
        for matrix in self._of.get(name, ()):
            key, numel = matrix.tensor.name, matrix.tensor.numel
            flat, missing = self._open.pop(key) if key in self._open else (torch.empty(numel), numel)
            missing -= matrix.collect(flat, name, start, values)
            if not missing:
                matrix.write(flat, self._writer)
            elif missing < numel:
                self._open[key] = flat, missing


def quantization_config(dtype: DType, plain: DType, kept: Sequence[str]) -> dict[str, Any]:
    """Return the block of config.json for a narrow format; `kept` are the modules that are not narrow."""
    if dtype is DType.FP8_128X128:
        block = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        return {**block, "activation_scheme": "dynamic", "modules_to_not_convert": list(kept)}
    if dtype is DType.NF4_64:
        word = str(plain.torch).removeprefix("torch.")
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": word,
            "llm_int8_skip_modules": list(kept),
        }
    kind, name = ("float", "float-quantized") if dtype is DType.FP8_ROW else ("int", "int-quantized")
    shared = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**shared, "strategy": "channel", "dynamic": False},
        "input_activations": {**shared, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(kept),
    }


def wide_modules(model: nn.Module, shapes: Mapping[str, Shape], narrow: Collection[str]) -> list[str]:
    """Return the paths of linear layers and stacks that are not exported in a narrow format.

    `shapes` are those of all parameters, tied ones by every name.
    """
    paths: dict[str, None] = {}
    for path, module in model.named_modules():
        for name in (f"{path}.{name}".lstrip(".") for name in module._parameters):
            size = len(shapes.get(name, ()))
            if name not in narrow and (size > 2 or (size == 2 and "Linear" in type(module).__name__)):
                paths[path] = None
    return list(paths)
