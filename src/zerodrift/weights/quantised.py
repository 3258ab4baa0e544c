"""Values of tensors that a checkpoint holds as codes with scales: decoded in fp32, or copied as they are.

`model/safetensors.py` finds the tensors.

Invariant: a value is `number * scale` in fp32, as the library that wrote it decodes it, and is never rounded
to 16 bits on the way. Codes that a narrow storage can hold as they are keep every bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerodrift.kernels import PackedRun, narrow
from zerodrift.model import QuantisedTensor
from zerodrift.weights.boxes import Box, simplified
from zerodrift.weights.reader import SafetensorsReader, spans


def decode_quantised(
    tensor: QuantisedTensor,
    reader: SafetensorsReader,
    box: Box,
    out: torch.Tensor,
    first: int,
    steps: bool = False,
) -> None:
    """Decode one box of the tensor into flat `out`, which begins at element `first` of the target.

    With `steps` it is how far a value may have been from what it was rounded to, instead.
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
    """Copy the codes of so many elements from `origin` on, and the scales of their blocks."""
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
    """Return True if a parameter has elements in the order of the file, from a block of each on."""
    return all(box.is_run and box.start % 256 == box.origin % 256 == 0 for box in map(simplified, boxes))


def _codes(tensor: QuantisedTensor, reader: SafetensorsReader, first: int, count: int) -> torch.Tensor:
    if tensor.form.element.bits == 8:
        return reader.staged(tensor.codes, first, count).view(torch.uint8)
    low, high = first // 2, -(-(first + count) // 2)
    codes = narrow.unpack(tensor.form.element, reader.staged(tensor.codes, low, high - low))
    return codes[first - 2 * low :][:count]


def _scales(tensor: QuantisedTensor, reader: SafetensorsReader, elements: torch.Tensor) -> torch.Tensor:
    """Return the scales of ascending elements. fp32."""
    index = _blocks(tensor, elements)
    low, high = int(index[0]), int(index[-1]) + 1
    if isinstance(tensor.form.block, tuple):  # tiles of a row are not in the order of its elements
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
