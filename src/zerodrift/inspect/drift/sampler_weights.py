"""Read the sampler's tensors from an exported or quantised folder, in the names of the trainer's model.

A tensor keeps the dtype of the files. One of codes with scales is decoded to fp32, with half a step of each
element beside it. A tied tensor that the files hold twice is read twice.

Invariant: every tensor of the model is read, or named as missing; files of another model are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zerodrift.errors import ModelError, UnsupportedError, listed
from zerodrift.model import list_tensors
from zerodrift.weights import Box, ExpectedTensor, SafetensorsReader, decode_quantised, match

_PACKED = re.compile(r".*\.(qweight|qzeros|g_idx|weight_packed|blocks)")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SamplerTensor:
    values: Tensor  # values in the dtype of the files; fp32 if the files scale them
    dtype: str  # dtype of the files: `bf16`, `int8 scaled`
    half_step: Tensor | None = None  # most that rounding may have changed each element of a scaled tensor


@dataclass(frozen=True, slots=True)
class SamplerWeights:
    path: str
    tensors: dict[str, SamplerTensor]
    """By name in the model; under every name of a tied parameter that the files hold."""
    missing: tuple[str, ...]  # first names that no file has
    unread: tuple[str, ...]  # names in the files that the model has no place for


def read_sampler_weights(path: Path, model: nn.Module, want: Sequence[ExpectedTensor]) -> SamplerWeights:
    """Read all tensors of a folder or file for a model."""
    found = list_tensors(path)
    packed = [tensor.name for tensor in found if _PACKED.fullmatch(tensor.name)]
    if packed:
        must = "must hold a tensor for each of the model, if need be of 8 bits with a scale or in NF4"
        do = "Dequantize it with the library that packed it, and give that folder."
        raise UnsupportedError(path, must, got=f"packed ones: {listed(packed[:_SHOWN])}", do=do)
    matched = match(path, found, model, want, False)
    if matched.missing and matched.unexpected:
        must = "must have the names of the trainer's model"
        got = f"no {listed(matched.missing[:_SHOWN])}, but {listed(matched.unexpected[:_SHOWN])}"
        do = "Export it with the names of the model, or give the files of this one."
        raise ModelError(path, must, got=got, do=do)
    reader = SafetensorsReader()
    tensors: dict[str, SamplerTensor] = {}

    def read(boxes: Sequence[Box], shape: tuple[int, ...], dtype: torch.dtype, steps: bool = False) -> Tensor:
        flat = torch.empty(math.prod(shape), dtype=dtype)
        for box in boxes:
            quantised = matched.quantised.get(box.number)
            if quantised is not None:
                decode_quantised(quantised, reader, box, flat, 0, steps)
            else:
                reader.read(matched.tensors[box.number], box, flat)
        return flat.view(shape)

    try:
        for entry in want:
            filled = matched.filled.get(entry.name)
            for number, boxes in enumerate((filled.boxes, *filled.again) if filled is not None else ()):
                assert filled is not None
                file_name = matched.tensors[boxes[0].number].name if boxes else ""
                name = file_name if file_name in entry.names else entry.names[number]
                quantised = matched.quantised.get(boxes[0].number) if boxes else None
                dtype, half = str(filled.exact), None
                if quantised is not None and all(box.number in matched.quantised for box in boxes):
                    dtype = f"{quantised.stored} scaled"
                    half = read(boxes, entry.shape, torch.float32, steps=True)
                tensors[name] = SamplerTensor(read(boxes, entry.shape, filled.exact.torch), dtype, half)
    finally:
        reader.close()
    names = {entry.name for entry in want}
    missing = tuple(name for name in matched.missing if name in names)
    return SamplerWeights(str(path), tensors, missing, tuple(matched.unexpected))
