"""The other side's tensors: an exported or quantised folder, in the names and layout of the trainer's model.

A tensor keeps the dtype that the files have for it. One of 8 bits that files scale is multiplied out to fp32,
and half a step of its scale is kept beside it. What a model ties and files hold twice is read twice.

Invariant: every tensor of the model is read, or named as missing; files of another model are refused.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zerodrift.dtypes import DType
from zerodrift.errors import ModelError, UnsupportedError, listed
from zerodrift.model.header import Stored
from zerodrift.model.safetensors import stored
from zerodrift.weights.boxes import Box
from zerodrift.weights.matching import ExpectedTensor, Match, match
from zerodrift.weights.reader import SafetensorsReader

_SCALE = re.compile(r"(?P<stem>.+?)(\.weight)?[._](weight_)?(scale|scales|scale_inv)")
_PACKED = re.compile(r".*\.(qweight|qzeros|g_idx|weight_packed|weight_zero_point|absmax|quant_map|blocks)")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SentTensor:
    """One tensor of the other side."""

    values: Tensor
    """In the dtype of the files; fp32 of what they scale."""
    dtype: str
    """What the files say that it is: `bf16`, `int8 scaled`."""
    half_step: Tensor | None = None
    """Of each element of a scaled tensor, what rounding may have changed it by."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A folder, read."""

    path: str
    tensors: dict[str, SentTensor]
    """By name in the model; under every name of a tied parameter that files hold."""
    missing: tuple[str, ...]
    """First names of what no file has."""
    unread: tuple[str, ...]
    """Names in the files that the model has no place for."""


def read_sent(path: Path, model: nn.Module, want: Sequence[ExpectedTensor]) -> Sent:
    """All tensors of a folder or file for a model."""
    found = stored(path)
    _require_unpacked(path, found)
    scaled = _scaled(found)
    if not scaled:
        return _read(path, match(path, found, model, want, False), want, {}, None)
    scales = {scale.name for _, scale in scaled}
    with tempfile.TemporaryDirectory(prefix="zerodrift-drift-") as folder:
        values, steps = _multiplied_out(scaled, Path(folder))
        kept = [tensor for tensor in found if tensor.name not in scales]
        label = {tensor.name: f"{tensor.dtype} scaled" for tensor, _ in scaled}
        plain = tuple(values.get(tensor.name, tensor) for tensor in kept)
        rounded = tuple(steps.get(tensor.name, tensor) for tensor in kept)
        of_steps = match(path, rounded, model, want, False)
        return _read(path, match(path, plain, model, want, False), want, label, of_steps)


def _require_unpacked(path: Path, tensors: Sequence[Stored]) -> None:
    packed = [tensor.name for tensor in tensors if _PACKED.fullmatch(tensor.name)]
    if packed:
        raise UnsupportedError(
            path,
            "must hold a tensor for each of the model, if need be of 8 bits with a scale",
            got=f"packed ones: {listed(packed[:_SHOWN])}",
            do="Dequantize it with the library that packed it, and give that folder.",
        )


def _read(
    path: Path, matched: Match, want: Sequence[ExpectedTensor], label: dict[str, str], of_steps: Match | None
) -> Sent:
    if matched.missing and matched.unexpected:
        raise ModelError(
            path,
            "must have the names of the trainer's model",
            got=f"no {listed(matched.missing[:_SHOWN])}, but {listed(matched.unexpected[:_SHOWN])}",
            do="Export it with the names of the model, or give the files of this one.",
        )
    reader = SafetensorsReader()
    tensors: dict[str, SentTensor] = {}
    try:
        for entry in want:
            filled = matched.filled.get(entry.name)
            if filled is None:
                continue
            layouts = (filled.boxes, *filled.again)
            for number, boxes in enumerate(layouts):
                first = matched.tensors[boxes[0].number] if boxes else None
                name = first.name if first is not None and first.name in entry.names else entry.names[number]
                values = _tensor(reader, matched, boxes, entry.shape, filled.exact.torch)
                told = label.get(first.name, str(filled.exact)) if first is not None else str(filled.exact)
                half = None
                if of_steps is not None and first is not None and first.name in label:
                    half = _tensor(reader, of_steps, boxes, entry.shape, torch.float32)
                tensors[name] = SentTensor(values, told, half)
    finally:
        reader.close()
    missing = tuple(name for name in matched.missing if name in {entry.name for entry in want})
    return Sent(str(path), tensors, missing, tuple(matched.unexpected))


def _tensor(
    reader: SafetensorsReader,
    matched: Match,
    boxes: Sequence[Box],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    flat = torch.empty(math.prod(shape), dtype=dtype)
    for box in boxes:
        reader.read(matched.tensors[box.number], box, flat)
    return flat.view(shape)


# --- 8 bits and a scale ---------------------------------------------------------------------------------

_EIGHT_BIT = (DType.INT8, DType.FP8_E4M3, DType.FP8_E5M2)


def _scaled(tensors: Sequence[Stored]) -> list[tuple[Stored, Stored]]:
    """Tensors of 8 bits, each with what scales it."""
    scales: dict[str, Stored] = {}
    for tensor in tensors:
        found = _SCALE.fullmatch(tensor.name)
        if found is not None and tensor.dtype.is_floating and tensor.dtype.size > 1:
            scales[found["stem"]] = tensor
    pairs = []
    for tensor in tensors:
        scale = scales.get(tensor.name.removesuffix(".weight"))
        if tensor.dtype in _EIGHT_BIT and scale is not None and scale.name != tensor.name:
            pairs.append((tensor, scale))
    return pairs


def _multiplied_out(
    scaled: Sequence[tuple[Stored, Stored]], folder: Path
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """The same tensors in fp32, and half a step of each element, in files of their own."""
    reader = SafetensorsReader()
    values, steps = {}, {}
    try:
        for tensor, scale in scaled:
            codes = _whole(reader, tensor)
            factor = _spread(_whole(reader, scale).float(), tensor, scale)
            values[tensor.name] = (codes.float() * factor).contiguous()
            steps[tensor.name] = (_spacing(codes) / 2 * factor.abs() * (1 + 2**-8)).contiguous()
    finally:
        reader.close()
    return _written(values, folder / "values.safetensors"), _written(steps, folder / "steps.safetensors")


def _whole(reader: SafetensorsReader, tensor: Stored) -> Tensor:
    flat = torch.empty(math.prod(tensor.shape), dtype=tensor.dtype.torch)
    if flat.numel():
        (box,) = _run(flat.numel())
        reader.read(tensor, box, flat)
    return flat.view(tensor.shape)


def _run(numel: int) -> tuple[Box, ...]:
    from zerodrift.weights.boxes import Layout

    return Layout.of(0, (numel,)).boxes()


def _spread(factor: Tensor, tensor: Stored, scale: Stored) -> Tensor:
    """A scale for every element: of all, of a row, or of a block."""
    shape = tensor.shape
    if factor.numel() == 1:
        return factor.reshape(()).expand(shape)
    if factor.dim() == 1 and len(shape) > 1 and factor.numel() == shape[0]:
        return factor.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
    if factor.dim() == len(shape):
        for dimension, length in enumerate(shape):
            block = -(-length // factor.shape[dimension])
            if block > 1 and factor.shape[dimension] > 1:
                block = 1 << (block - 1).bit_length()  # the last block may be cut
            factor = factor.repeat_interleave(block, dimension).narrow(dimension, 0, length)
        return factor
    raise ModelError(
        scale.name,
        f"must be one scale, one for each row or for each block of `{tensor.name}`, {list(shape)}",
        got=list(scale.shape),
    )


def _spacing(codes: Tensor) -> Tensor:
    """From one code's value to the next, for each element, before it is scaled."""
    if codes.dtype is torch.int8:
        return torch.ones(codes.shape)
    form = torch.finfo(codes.dtype)
    _, exponent = torch.frexp(codes.float().abs().clamp(form.smallest_normal))
    return torch.ldexp(torch.full(codes.shape, form.eps), exponent - 1)


def _written(tensors: dict[str, Tensor], file: Path) -> dict[str, Stored]:
    save_file(tensors, file)
    return {tensor.name: replace(tensor, file=file) for tensor in stored(file)}
