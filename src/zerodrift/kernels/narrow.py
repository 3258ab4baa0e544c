"""Encode values into a narrow format and decode them: the definition in plain PyTorch, and its fast forms.

A block of values becomes a code per element and one scale. The scale comes from the block's largest
magnitude `amax`, and is rounded to its own dtype before it divides. A code is the
element's nearest number to `value / scale`, ties to even (NF4: ties to the lower), or one of the two numbers
around it by random bits. A quotient beyond the largest number becomes that number. Decoding is
`number * scale` in fp32, rounded once more if the result has 16 bits. All arithmetic is in fp32.

A block with an infinity or a NaN decodes to NaN as a whole, so that it is seen. A block whose `amax` is below
2^-96 decodes to zeros, and an `amax` above 2^126 counts as 2^126: between them no scale is subnormal or
overflows.

Flat formats are packed: the codes of a run of whole blocks, two codes of 4 bits to a byte with the first in
the low half (NF4: in the high half, as in bitsandbytes), then the scales. A run is sent or stored as one
piece, such as a rank's slice.

Invariant: the fast forms give the bits of `reference_encode` and `reference_decode`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerodrift.dtypes import NF4, DType, Element, Format
from zerodrift.kernels import device, native
from zerodrift.kernels.random_bits import random_words, step_key

LEAST, MOST = 2.0**-96, 2.0**126

_FLOATS = {Element.E4M3: torch.float8_e4m3fn, Element.E5M2: torch.float8_e5m2}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def form_of(dtype: DType) -> Format:
    """Return the definition of a narrow format."""
    assert dtype.format is not None, f"{dtype} is no narrow format"
    return dtype.format


@dataclass(frozen=True, slots=True)
class Draws:
    """The source of a run's random words; see `random_bits.py`."""

    keys: Tensor
    """A key for each 256 elements, the last ones in part. int64."""
    number: int
    """Number of the draw; each number gives different words."""

    def words(self, numel: int) -> Tensor:
        """Return the word of each element. Shape [numel], int64."""
        return random_words(self.keys, self.number).view(-1)[:numel]

    def split(self, parts: int) -> list[Draws]:
        """Return the draws of so many parts of equal length."""
        return [Draws(keys, self.number) for keys in self.keys.chunk(parts)]


@torch.no_grad()
def encode(dtype: DType, values: Tensor, packed: Tensor, draws: Draws | None = None) -> None:
    """Encode flat values into `packed`. Shapes [whole blocks], any floating dtype; [nbytes], uint8.

    With `draws` each value is rounded up or down by the lower 16 bits of its random word, so that the mean is
    kept. NF4 is only rounded to nearest.
    """
    form, codes, scales = _split(dtype, values.numel(), packed)
    if _execute(_ENCODE, form, values, codes, scales, draws):
        return
    blocks = values.reshape(-1, form.run)
    words = None if draws is None else draws.words(values.numel()).view(blocks.shape)
    made, steps = reference_encode(form, blocks, words)
    codes.copy_(pack(form.element, made.view(-1)))
    scales.copy_(steps)


@torch.no_grad()
def decode(dtype: DType, packed: Tensor, out: Tensor, add: bool = False) -> None:
    """Decode a packed run into flat `out`, in the dtype of `out`. Shapes [nbytes], [whole blocks].

    With `add`, the decoded values, in the dtype of `out`, are added to `out`.
    """
    if add and out.dtype is not torch.float32:
        decoded = torch.empty_like(out)
        decode(dtype, packed, decoded)
        out += decoded
        return
    form, codes, scales = _split(dtype, out.numel(), packed)
    if _execute(_DECODE_AND_ADD if add else _DECODE, form, out, codes, scales):
        return
    unpacked = unpack(form.element, codes).view(-1, form.run)
    decoded = reference_decode(form, unpacked, scales).view(-1)
    if add:
        out += decoded
    else:
        out.copy_(decoded)


def round_trip(dtype: DType, values: Tensor, to: torch.dtype | None = None) -> Tensor:
    """Return values after encoding and decoding, in another or their own dtype. Any shape; the first element
    begins a block."""
    whole = torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % form_of(dtype).run))
    out = torch.empty_like(whole, dtype=to)
    decode_runs(dtype, encode_runs(dtype, whole, 1), out, 1)
    return out[: values.numel()].view(values.shape)


def encode_runs(dtype: DType, values: Tensor, runs: int, draws: Draws | None = None) -> Tensor:
    """Return flat values as packed runs of equal length, one after the other."""
    packed = values.new_empty(runs * dtype.nbytes(values.numel() // runs), dtype=torch.uint8)
    drawn = [None] * runs if draws is None else draws.split(runs)
    for part, run, draw in zip(values.chunk(runs), packed.chunk(runs), drawn, strict=True):
        encode(dtype, part, run, draw)
    return packed


def decode_runs(dtype: DType, packed: Tensor, out: Tensor, runs: int) -> None:
    """Decode packed runs into flat `out`, in its dtype."""
    for part, run in zip(out.chunk(runs), packed.chunk(runs), strict=True):
        decode(dtype, run, part)


# --- the fast forms ---------------------------------------------------------------------------------------

_ENCODE, _DECODE, _DECODE_AND_ADD = range(3)
"""Operations of a fast form, as `narrow.h` and `narrow_programs.py` number them."""

_ELEMENTS = (Element.E4M3, Element.E5M2, Element.E2M1, Element.INT8, Element.INT4, Element.NF4)
_SCALE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "e8m0": torch.uint8}
"""The dtypes of scales in memory, in the order of their numbers; e8m0 as bytes."""


def _split(dtype: DType, numel: int, packed: Tensor) -> tuple[Format, Tensor, Tensor]:
    """Return the format of a packed run, its codes and its scales."""
    form = form_of(dtype)
    if numel % form.run or packed.numel() != dtype.nbytes(numel) or packed.dtype is not torch.uint8:
        raise AssertionError(f"{packed.numel()} bytes are no run of {numel} values in {dtype}")
    codes, scales = packed.tensor_split([numel * form.element.bits // 8])
    return form, codes, scales.view(_SCALE_DTYPES[form.scale])


def _execute(
    way: int, form: Format, values: Tensor, codes: Tensor, scales: Tensor, draws: Draws | None = None
) -> bool:
    """Run the fast form; return False if neither compiled code nor a program takes these tensors."""
    if values.dtype not in native.TYPES or not (values.is_contiguous() and codes.is_contiguous()):
        return False
    built = native.library() if values.device.type == "cpu" else None
    if built is None and not (values.numel() and device.works(values.device)):
        return False
    words, threads = choices(form), torch.get_num_threads()
    keys, number = (None, 0) if draws is None else (draws.keys, step_key(draws.number))
    if built is None:
        numbers = numbers_of(form.element, values.device)
        device.narrow(codes, scales, values, numbers, keys, number, way=way, **words)
        return True
    described = (ctypes.c_int32 * 3)(*(words[name] for name in ("element", "block", "scale")))
    run = values.data_ptr(), native.TYPES[values.dtype], codes.data_ptr(), scales.data_ptr()
    keys_at = None if keys is None else keys.data_ptr()
    built.narrow(values.numel(), described, way, *run, keys_at, number, threads)
    return True


def choices(form: Format) -> dict[str, Any]:
    """Return a flat format as the compiled code and the program number it."""
    return {
        "element": _ELEMENTS.index(form.element),
        "bits": form.element.bits,
        "largest": form.element.largest,
        "exponent": math.floor(math.log2(form.element.largest)),
        "block": form.block,
        "scale": [*_SCALE_DTYPES].index(form.scale),
    }


# --- the definition ---------------------------------------------------------------------------------------


@torch.no_grad()
def reference_encode(form: Format, blocks: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode a block per row as (codes, scales): uint8, shape [blocks, elements]; fp32, bf16 or the exponents
    of e8m0 as uint8, shape [blocks]."""
    blocks = blocks.float()
    amax = blocks.abs().amax(1) if blocks.shape[1] else blocks.new_zeros(len(blocks))
    scales = scales_of(form, amax)
    divisor = torch.where(scales > 0, scales, 1.0)
    quotients = torch.where((scales > 0)[:, None], blocks / divisor[:, None], 0.0)  # zeros for NaN as well
    codes = codes_of(form.element, quotients, draws)
    if form.scale == "bf16":  # by its bits: a cast of torch's leaves other NaNs
        return codes, (scales.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    if form.scale == "e8m0":  # the biased exponent, 255 for a NaN; of zero it is 0, whose codes are 0
        return codes, (scales.view(torch.int32) >> 23 & 0xFF).to(torch.uint8)
    return codes, scales


@torch.no_grad()
def reference_decode(form: Format, codes: Tensor, scales: Tensor) -> Tensor:
    """Decode what `reference_encode` returns. Shape [blocks, elements], fp32."""
    values = numbers_of(form.element, codes.device)[codes.int()]
    return values * (powers_of(scales) if scales.dtype is torch.uint8 else scales.float())[:, None]


def scales_of(form: Format, amax: Tensor) -> Tensor:
    """Return the scale of blocks from their largest magnitudes: zero, normal or NaN. fp32."""
    capped = amax.clamp(max=MOST)
    if form.scale == "e8m0":
        shift = math.floor(math.log2(form.element.largest))
        bits = (capped.view(torch.int32) & 0x7F800000) - (shift << 23)
        scales = bits.view(torch.float32)
    else:
        scales = capped / form.element.largest
    if form.scale == "bf16":
        scales = scales.bfloat16().float()
    scales = torch.where(amax < LEAST, 0.0, scales)
    return torch.where(amax.isfinite(), scales, torch.nan)


def codes_of(element: Element, quotients: Tensor, draws: Tensor | None = None) -> Tensor:
    """Return the codes of fp32 quotients; none is NaN. uint8.

    With `draws` a quotient is rounded up if its share of the step above the number below it and a random
    fraction of 16 bits add up to one.
    """
    if element is Element.NF4:
        if draws is not None:
            raise AssertionError("NF4 is only rounded to nearest")
        numbers = torch.tensor(NF4, dtype=torch.float64)
        bounds = ((numbers[1:] + numbers[:-1]) / 2).float().to(quotients.device)
        return torch.bucketize(quotients, bounds).to(torch.uint8)
    part = quotients.clamp(-element.largest, element.largest)
    if draws is None and element in _FLOATS:
        return part.to(_FLOATS[element]).view(torch.uint8)
    if element in (Element.INT8, Element.INT4):
        below = part.floor()
        share = part - below
    else:
        numbers = numbers_of(element, part.device)
        numbers = numbers[numbers.signbit().logical_not() & (numbers <= element.largest)]
        below = torch.bucketize(part.abs(), numbers, right=True) - 1
        steps = torch.cat([numbers.diff(), numbers.new_ones(1)])  # nothing is above the largest
        share = (part.abs() - numbers[below]) / steps[below]
    if draws is None:
        up = (share > 0.5) | ((share == 0.5) & (below % 2 == 1))
    else:
        up = share + (draws & 0xFFFF).float() * 2.0**-16 >= 1
    codes = (below + up).to(torch.int8).view(torch.uint8)
    if element in (Element.INT8, Element.INT4):
        return codes & (0xFF >> (8 - element.bits))
    return codes | (torch.signbit(part).to(torch.uint8) << (element.bits - 1))


@functools.cache
def numbers_of(element: Element, device: torch.device) -> Tensor:
    """Return the number of every code, fp32."""
    codes = torch.arange(2**element.bits, dtype=torch.uint8)
    if element in _FLOATS:
        numbers = codes.view(_FLOATS[element]).float()
    elif element is Element.NF4:
        numbers = torch.tensor(NF4)
    elif element is Element.E2M1:
        numbers = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    else:
        wrap = 2 ** (element.bits - 1)
        numbers = (codes.int() - 2 * wrap * (codes >= wrap)).float()
    return numbers.to(device)


def half_steps(element: Element) -> Tensor:
    """Return half the distance of each code's number to its farther neighbour. Shape [codes], fp32."""
    numbers = numbers_of(element, torch.device("cpu"))
    known = numbers[numbers.isfinite()].unique()
    numbers = numbers.nan_to_num(posinf=float(known[-1]), neginf=float(known[0]))
    gaps = known.diff()
    farther = torch.maximum(torch.cat((gaps[:1], gaps)), torch.cat((gaps, gaps[-1:])))
    return farther[torch.searchsorted(known, numbers)] / 2


def powers_of(exponents: Tensor) -> Tensor:
    """Return e8m0 as fp32: 255 is NaN, and 0 the least power of two, 2^-127."""
    powers = torch.where(exponents == 0, 0x400000, exponents.int() << 23).view(torch.float32)
    return torch.where(exponents == 255, torch.nan, powers)


def pack(element: Element, codes: Tensor) -> Tensor:
    """Return flat codes as bytes: two codes of 4 bits share a byte."""
    if element.bits == 8:
        return codes
    first, second = codes.view(-1, 2).unbind(1)
    return (first << 4) | second if element is Element.NF4 else first | (second << 4)


def unpack(element: Element, data: Tensor) -> Tensor:
    """Return the codes of bytes, the inverse of `pack`."""
    if element.bits == 8:
        return data
    low, high = data & 0xF, data >> 4
    return torch.stack((high, low) if element is Element.NF4 else (low, high), 1).view(-1)


# --- blocks of matrices ---------------------------------------------------------------------------------


def as_blocks(form: Format, values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a parameter's values with a block per row; tiles that the edge cuts are filled with zeros."""
    numel = math.prod(shape)
    if isinstance(form.block, int):
        return torch.nn.functional.pad(values.reshape(-1), (0, -numel % form.block)).view(-1, form.block)
    if form.block == "tensor":
        return values.reshape(1, -1)
    if form.block == "row":
        return values.reshape(-1, shape[-1] if shape else 1)
    tall, wide = form.block
    rows, columns = (shape[-2] if len(shape) > 1 else 1), (shape[-1] if shape else 1)
    stacked = values.reshape(-1, rows, columns)
    stacked = torch.nn.functional.pad(stacked, (0, -columns % wide, 0, -rows % tall))
    tiles = stacked.view(len(stacked), stacked.shape[1] // tall, tall, stacked.shape[2] // wide, wide)
    return tiles.transpose(2, 3).reshape(-1, tall * wide)


def from_blocks(form: Format, blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the values of `as_blocks` in the parameter's shape."""
    numel = math.prod(shape)
    if not isinstance(form.block, tuple):
        return blocks.reshape(-1)[:numel].view(*shape)
    tall, wide = form.block
    rows, columns = (shape[-2] if len(shape) > 1 else 1), (shape[-1] if shape else 1)
    down, across = -(-rows // tall), -(-columns // wide)
    tiles = blocks.view(-1, down, across, tall, wide).transpose(2, 3)
    return tiles.reshape(-1, down * tall, across * wide)[:, :rows, :columns].reshape(*shape)
