"""Read the sampler's tensors from an exported or quantised folder, in the names of the trainer's model.

A tensor keeps the dtype of the files. An 8-bit tensor with a scale is dequantised to fp32, with half a step
of its scale beside it. A tied tensor that the files hold twice is read twice.

Invariant: every tensor of the model is read, or named as missing; files of another model are refused.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zerodrift.dtypes import DType
from zerodrift.errors import ModelError, UnsupportedError, listed
from zerodrift.model import StoredTensor, list_tensors
from zerodrift.weights import Box, ExpectedTensor, Layout, Match, SafetensorsReader, match

_SCALE = re.compile(r"(?P<stem>.+?)(\.weight)?[._](weight_)?(scale|scales|scale_inv)")
_PACKED = re.compile(r".*\.(qweight|qzeros|g_idx|weight_packed|weight_zero_point|absmax|quant_map|blocks)")
_EIGHT_BIT = (DType.INT8, DType.FP8_E4M3, DType.FP8_E5M2)
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
        must = "must hold a tensor for each of the model, if need be of 8 bits with a scale"
        do = "Dequantize it with the library that packed it, and give that folder."
        raise UnsupportedError(path, must, got=f"packed ones: {listed(packed[:_SHOWN])}", do=do)
    scales = {
        name["stem"]: tensor
        for tensor in found
        if (name := _SCALE.fullmatch(tensor.name)) and tensor.dtype.is_floating and tensor.dtype.size > 1
    }
    scaled = [
        (tensor, scale)
        for tensor in found
        if tensor.dtype in _EIGHT_BIT
        and (scale := scales.get(tensor.name.removesuffix(".weight"))) is not None
    ]
    if not scaled:
        return _read(path, match(path, found, model, want, False), want, {}, None)
    used = {scale.name for _, scale in scaled}
    with tempfile.TemporaryDirectory(prefix="zerodrift-drift-") as folder:
        values, steps = _dequantise(scaled, Path(folder))
        kept = [tensor for tensor in found if tensor.name not in used]
        labels = {tensor.name: f"{tensor.dtype} scaled" for tensor, _ in scaled}
        plain = tuple(values.get(tensor.name, tensor) for tensor in kept)
        half = match(path, tuple(steps.get(tensor.name, tensor) for tensor in kept), model, want, False)
        return _read(path, match(path, plain, model, want, False), want, labels, half)


def _read(
    path: Path, matched: Match, want: Sequence[ExpectedTensor], labels: Mapping[str, str], steps: Match | None
) -> SamplerWeights:
    """`labels` has the dtypes of scaled tensors; `steps` matches their half steps."""
    if matched.missing and matched.unexpected:
        must = "must have the names of the trainer's model"
        got = f"no {listed(matched.missing[:_SHOWN])}, but {listed(matched.unexpected[:_SHOWN])}"
        do = "Export it with the names of the model, or give the files of this one."
        raise ModelError(path, must, got=got, do=do)
    reader = SafetensorsReader()
    tensors: dict[str, SamplerTensor] = {}

    def read(source: Match, boxes: Sequence[Box], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        flat = torch.empty(math.prod(shape), dtype=dtype)
        for box in boxes:
            reader.read(source.tensors[box.number], box, flat)
        return flat.view(shape)

    try:
        for entry in want:
            filled = matched.filled.get(entry.name)
            for number, boxes in enumerate((filled.boxes, *filled.again) if filled is not None else ()):
                assert filled is not None
                file_name = matched.tensors[boxes[0].number].name if boxes else ""
                name = file_name if file_name in entry.names else entry.names[number]
                half = None
                if steps is not None and file_name in labels:
                    half = read(steps, boxes, entry.shape, torch.float32)
                values = read(matched, boxes, entry.shape, filled.exact.torch)
                tensors[name] = SamplerTensor(values, labels.get(file_name, str(filled.exact)), half)
    finally:
        reader.close()
    names = {entry.name for entry in want}
    missing = tuple(name for name in matched.missing if name in names)
    return SamplerWeights(str(path), tensors, missing, tuple(matched.unexpected))


def _dequantise(
    scaled: Sequence[tuple[StoredTensor, StoredTensor]], folder: Path
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Write the tensors in fp32, and half a step of each element, to files of their own."""
    reader = SafetensorsReader()

    def read(tensor: StoredTensor) -> Tensor:
        flat = torch.empty(math.prod(tensor.shape), dtype=tensor.dtype.torch)
        if flat.numel():
            (box,) = Layout.of(0, (flat.numel(),)).boxes()
            reader.read(tensor, box, flat)
        return flat.view(tensor.shape)

    def written(tensors: dict[str, Tensor], file: Path) -> dict[str, StoredTensor]:
        save_file(tensors, file)
        return {tensor.name: replace(tensor, file=file) for tensor in list_tensors(file)}

    values, steps = {}, {}
    try:
        for tensor, scale in scaled:
            codes = read(tensor)
            factor = _expand_scale(read(scale).float(), tensor, scale)
            values[tensor.name] = (codes.float() * factor).contiguous()
            steps[tensor.name] = (_spacing(codes) / 2 * factor.abs() * (1 + 2**-8)).contiguous()
    finally:
        reader.close()
    return written(values, folder / "values.safetensors"), written(steps, folder / "steps.safetensors")


def _expand_scale(factor: Tensor, tensor: StoredTensor, scale: StoredTensor) -> Tensor:
    """Expand a scale of a tensor, of its rows or of its blocks to every element."""
    shape = tensor.shape
    if factor.numel() == 1:
        return factor.reshape(()).expand(shape)
    if factor.dim() == 1 and len(shape) > 1 and factor.numel() == shape[0]:
        return factor.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    if factor.dim() != len(shape):
        must = f"must be one scale, one for each row or for each block of `{tensor.name}`, {list(shape)}"
        raise ModelError(scale.name, must, got=list(scale.shape))
    for dimension, length in enumerate(shape):
        block = -(-length // factor.shape[dimension])
        if block > 1 and factor.shape[dimension] > 1:
            block = 1 << (block - 1).bit_length()  # the last block may be cut
        factor = factor.repeat_interleave(block, dimension).narrow(dimension, 0, length)
    return factor


def _spacing(codes: Tensor) -> Tensor:
    """Distance from each code's value to the next, before the scale."""
    if codes.dtype is torch.int8:
        return torch.ones(codes.shape)
    form = torch.finfo(codes.dtype)
    _, exponent = torch.frexp(codes.float().abs().clamp(form.smallest_normal))
    return torch.ldexp(torch.full(codes.shape, form.eps), exponent - 1)
