"""Names, sizes and ranges of dtypes and narrow formats, and the losses of casts between them.

A narrow format is a dtype whose elements of 4 or 8 bits share scales. It has bytes for a number of elements,
and no size of one element; `kernels/narrow.py` computes with it. Only `DType.torch` imports torch, because
planning runs without torch.

Invariant: a dtype has one short name (`bf16`), used in config keys, tables, errors and docs. The blocks of a
format begin where a parameter begins, or with each of its rows, so no slicing changes a code or a scale.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zerodrift.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch


# --- narrow formats ---------------------------------------------------------------------------------------


class Element(enum.Enum):
    """The numbers that a code of 4 or 8 bits stands for."""

    __hash__ = object.__hash__
    E4M3 = "e4m3"
    """Sign, 4 exponent bits, 3 mantissa bits; no infinity, largest 448."""
    E5M2 = "e5m2"
    INT8 = "int8"
    """-127 to 127."""
    INT4 = "int4"
    """-7 to 7, in two's complement."""
    E2M1 = "e2m1"
    """0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign."""
    NF4 = "nf4"
    """Sixteen quantiles of a normal distribution, from -1 to 1."""

    @property
    def bits(self) -> int:
        return 4 if self in (Element.INT4, Element.E2M1, Element.NF4) else 8

    @property
    def largest(self) -> float:
        """The largest magnitude, which the largest magnitude of a block becomes."""
        return _LARGEST[self]


_LARGEST = {
    Element.E4M3: 448.0,
    Element.E5M2: 57344.0,
    Element.INT8: 127.0,
    Element.INT4: 7.0,
    Element.E2M1: 6.0,
    Element.NF4: 1.0,
}

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""The numbers of NF4's codes, as fp32 values (Dettmers et al., QLoRA, 2023)."""

Scale = Literal["fp32", "bf16", "e8m0"]
"""The dtype of the scale of a block with largest magnitude `amax`: `amax / largest` in fp32, or that rounded
to bf16, ties to even, before it divides; or the power of two of the OCP's microscaling formats,
`2^(floor(log2 amax) - floor(log2 largest))`."""

Block = int | tuple[int, int] | Literal["row", "tensor"]


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """A definition of how values rest or travel in few bits."""

    element: Element
    block: Block
    """Consecutive elements of the flattened parameter; or (rows, columns) of the last two dimensions, cut at
    the edges; or a row of the last dimension; or all of it."""
    scale: Scale = "fp32"

    @property
    def is_flat(self) -> bool:
        """Whether blocks are runs of elements, so that a slice of whole blocks is encoded alone."""
        return isinstance(self.block, int)

    @property
    def scale_bytes(self) -> int:
        return {"fp32": 4, "bf16": 2, "e8m0": 1}[self.scale]

    @property
    def run(self) -> int:
        """Elements of a block of a flat format."""
        if not isinstance(self.block, int):
            raise AssertionError(f"{self.describe()} has blocks that are no runs")
        return self.block

    @property
    def record_bytes(self) -> int:
        """Bytes of a block's codes and scale, for a flat format."""
        return self.run * self.element.bits // 8 + self.scale_bytes

    def keeps(self, source: Format, columns: int) -> bool:
        """Return True if a flat format can keep a source's codes: each block is inside one of the source.

        `columns` is the last dimension of the source.
        """
        if source.element is not self.element or self.scale != "fp32" or source.scale != "fp32":
            return False
        if isinstance(source.block, int) or source.block == "tensor":
            return source.block == "tensor" or source.block % self.run == 0
        return columns % self.run == 0 and (source.block == "row" or source.block[1] % self.run == 0)

    def blocks(self, shape: Sequence[int]) -> int:
        """Return the number of blocks of a parameter, or of a run of a flat format's whole blocks."""
        numel = math.prod(shape)
        if isinstance(self.block, int):
            return -(-numel // self.block)
        if not numel or self.block == "tensor":
            return int(numel > 0)
        columns = shape[-1] if shape else 1
        if self.block == "row":
            return numel // columns
        rows = shape[-2] if len(shape) > 1 else 1
        tall, wide = self.block
        return numel // (rows * columns) * -(-rows // tall) * -(-columns // wide)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of codes and scales."""
        return -(-math.prod(shape) * self.element.bits // 8) + self.blocks(shape) * self.scale_bytes

    def describe(self) -> str:
        """Return the definition as a phrase: `e4m3 in blocks of 128 with an fp32 scale`."""
        element, block = self.element.value, self.block
        if isinstance(block, int):
            blocks = f"blocks of {block}"
        elif isinstance(block, tuple):
            blocks = f"tiles of {block[0]}x{block[1]}"
        else:
            blocks = {"row": "rows", "tensor": "one block"}[block]
        scales = {"fp32": "an fp32 scale", "bf16": "a bf16 scale", "e8m0": "a power of two (floor)"}
        return f"{element} in {blocks} with {scales[self.scale]}"


# --- dtypes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Format:
    """Bytes, exponent bits and stored mantissa bits of a dtype, and its names. Integers have 0 bits."""

    size: int
    exponent: int
    mantissa: int
    torch: str
    safetensors: str


class DType(enum.Enum):
    """Dtype with its short name as the value."""

    __hash__ = object.__hash__  # `Enum.__hash__` is slow for lookups in tables
    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    FP8_128 = "fp8-128"
    E5M2_128 = "e5m2-128"
    INT8_256 = "int8-256"
    INT4_128 = "int4-128"
    INT4_64_BF16 = "int4-64-bf16"
    NF4_64 = "nf4-64"
    NF4_64_BF16 = "nf4-64-bf16"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"
    FP8_ROW = "fp8-row"
    FP8_TENSOR = "fp8-tensor"
    FP8_1X128 = "fp8-1x128"
    FP8_128X128 = "fp8-128x128"
    INT8_ROW = "int8-row"

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return self.value

    @property
    def size(self) -> int:
        """Bytes of one element. A narrow format has none: see `nbytes`."""
        if self.format is not None:
            raise AssertionError(f"an element of {self} has no size of its own")
        return _FORMATS[self].size

    @property
    def format(self) -> Format | None:
        """The definition of a narrow format; None for a plain dtype."""
        return NARROW.get(self)

    def nbytes(self, numel: int) -> int:
        """Bytes of so many elements, with the scales of a flat format."""
        form = self.format
        return numel * self.size if form is None else form.nbytes((numel,))

    @property
    def is_floating(self) -> bool:
        return _FORMATS[self].exponent > 0

    @property
    def mantissa(self) -> int:
        """Stored mantissa bits: half an ulp of 1.0 is 2 ** -(mantissa + 1)."""
        return _FORMATS[self].mantissa

    @property
    def exponent(self) -> int:
        """Exponent bits, which set the range."""
        return _FORMATS[self].exponent

    @property
    def safetensors(self) -> str:
        return _FORMATS[self].safetensors

    @functools.cached_property
    def torch(self) -> torch.dtype:
        """Dtype of torch; of a narrow format, that of its bytes. Imports torch."""
        import torch

        return getattr(torch, _FORMATS[self].torch)

    def holds(self, other: DType) -> bool:
        """Return True if this dtype represents every value of `other`."""
        return self is other or (
            self.is_floating
            and other.is_floating
            and self.exponent >= other.exponent
            and self.mantissa >= other.mantissa
        )


_FORMATS: dict[DType, _Format] = {
    DType.FP64: _Format(8, 11, 52, "float64", "F64"),
    DType.FP32: _Format(4, 8, 23, "float32", "F32"),
    DType.BF16: _Format(2, 8, 7, "bfloat16", "BF16"),
    DType.FP16: _Format(2, 5, 10, "float16", "F16"),
    DType.FP8_E4M3: _Format(1, 4, 3, "float8_e4m3fn", "F8_E4M3"),
    DType.FP8_E5M2: _Format(1, 5, 2, "float8_e5m2", "F8_E5M2"),
    DType.INT64: _Format(8, 0, 0, "int64", "I64"),
    DType.INT32: _Format(4, 0, 0, "int32", "I32"),
    DType.INT16: _Format(2, 0, 0, "int16", "I16"),
    DType.INT8: _Format(1, 0, 0, "int8", "I8"),
    DType.UINT8: _Format(1, 0, 0, "uint8", "U8"),
    DType.BOOL: _Format(1, 0, 0, "bool", "BOOL"),
    DType.COMPLEX64: _Format(8, 0, 0, "complex64", "C64"),
}

NARROW: Mapping[DType, Format] = {
    DType.FP8_128: Format(Element.E4M3, 128),
    DType.E5M2_128: Format(Element.E5M2, 128),
    DType.INT8_256: Format(Element.INT8, 256),
    DType.INT4_128: Format(Element.INT4, 128),
    DType.INT4_64_BF16: Format(Element.INT4, 64, "bf16"),
    DType.NF4_64: Format(Element.NF4, 64),
    DType.NF4_64_BF16: Format(Element.NF4, 64, "bf16"),
    DType.MXFP8: Format(Element.E4M3, 32, "e8m0"),
    DType.MXFP4: Format(Element.E2M1, 32, "e8m0"),
    DType.FP8_ROW: Format(Element.E4M3, "row"),
    DType.FP8_TENSOR: Format(Element.E4M3, "tensor"),
    DType.FP8_1X128: Format(Element.E4M3, (1, 128)),
    DType.FP8_128X128: Format(Element.E4M3, (128, 128)),
    DType.INT8_ROW: Format(Element.INT8, "row"),
}
"""The definition of every narrow format."""

_MANTISSA = {"e4m3": 3, "e5m2": 2, "int8": 6, "int4": 2, "e2m1": 1, "nf4": 2}
# A scale gives a format the range of fp32.
_FORMATS |= {
    dtype: _Format(0, 8, _MANTISSA[form.element.value], "uint8", "U8") for dtype, form in NARROW.items()
}

SHORT: Mapping[str, tuple[DType, ...]] = {
    "fp8": (DType.FP8_128, DType.FP8_ROW),
    "int8": (DType.INT8_256,),
    "int4": (DType.INT4_128,),
    "nf4": (DType.NF4_64,),
}
"""Short word in a config -> formats of the element. A column that admits one of them accepts the word."""

_SPELLINGS: dict[str, DType] = {
    **{dtype.value: dtype for dtype in DType},
    **{form.torch: dtype for dtype, form in _FORMATS.items() if dtype not in NARROW},
    "float": DType.FP32,
    "half": DType.FP16,
    "double": DType.FP64,
}

_TRAINING = (DType.FP32, DType.BF16, DType.FP16)
_FLAT = (DType.FP8_128, DType.MXFP8, DType.INT8_256)

_RESTING = (
    *(DType.NF4_64, DType.INT8_256, DType.FP8_128),
    *(DType.MXFP8, DType.INT4_128, DType.MXFP4),
    *(DType.NF4_64_BF16, DType.INT4_64_BF16),
)

EXPORTED = (DType.FP8_128X128, DType.FP8_ROW, DType.INT8_ROW, DType.NF4_64)
"""Narrow formats that other libraries read from files."""

ADMITTED: Mapping[str, tuple[DType, ...]] = {
    "storage": (*_TRAINING, *_RESTING),
    "frozen": _RESTING,
    "gather": (*_TRAINING, *_FLAT),
    "compute": _TRAINING,
    "compute.product": (*_TRAINING, DType.FP8_ROW),
    "grad": _TRAINING,
    "accumulate": _TRAINING,
    "reduce.wire": (*_TRAINING, *_FLAT, DType.E5M2_128, DType.INT4_128, DType.INT4_64_BF16),
    "reduce.sum": _TRAINING,
    "export": (*_TRAINING, *EXPORTED),
    "buffers": _TRAINING,
}
"""Column -> its dtypes in a config. `master` and `state` have other values; `frozen` is the `storage` of
frozen linear layers."""

BLOCK = 256
"""Elements of a block. Parameters start on multiples of BLOCK, and slices are multiples of BLOCK, so that no
block is cut. Values per block (partial norms, scales of `8bit` moments, keys of random rounding) therefore do
not depend on the stage."""


def spellings(dtypes: Sequence[DType]) -> list[str]:
    """Return every accepted spelling of the dtypes, short names first."""
    words = [text for text, dtype in _SPELLINGS.items() if dtype in dtypes]
    words += [text for dtype in dtypes if (text := word(dtype, dtypes)) in SHORT]
    return sorted(words, key=lambda text: (text not in DType._value2member_map_, text))


def parse(text: str) -> DType:
    """Parse a dtype: `bf16`, `bfloat16`, `torch.bfloat16` -> `DType.BF16`."""
    dtype = _SPELLINGS.get(text.strip().lower().removeprefix("torch."))
    if dtype is None:
        raise ConfigError("dtype", "must be known", got=repr(text), do=did_you_mean(text, _SPELLINGS))
    return dtype


def word(dtype: DType, among: Sequence[DType]) -> str:
    """Return the shortest word that means only this dtype among the dtypes of a column.

    A format with bf16 scales has no short word.
    """
    short = next((short for short, formats in SHORT.items() if dtype in formats), "")
    alike = [other for other in among if short and other.value.startswith(f"{short}-")]
    alike = [other for other in alike if NARROW[other].scale != "bf16"]
    return short if alike == [dtype] else dtype.value


def parse_among(text: str, dtypes: Sequence[DType]) -> DType:
    """Parse a dtype of a column; a short word such as `fp8` is the column's only format of that element."""
    plain = text.strip().lower()
    usual = next((dtype for dtype in dtypes if plain in SHORT and word(dtype, dtypes) == plain), None)
    return usual or parse(text)


def from_safetensors(text: str) -> DType | None:
    """Return the dtype of a safetensors name, or None if it is unknown."""
    return next((dtype for dtype, form in _FORMATS.items() if form.safetensors == text), None)


def from_torch(dtype: torch.dtype) -> DType | None:
    """Return our dtype for one of torch, or None if it is unknown."""
    return _SPELLINGS.get(str(dtype).removeprefix("torch."))


def widest(dtypes: tuple[DType, ...]) -> DType:
    """Return the narrowest of these dtypes that holds all of them. bf16 and fp16 give fp32.

    A plain dtype counts as wider than any narrow format.
    """
    if len(set(dtypes)) == 1:
        return dtypes[0]
    plain = tuple(dtype for dtype in dtypes if dtype.format is None)
    for candidate in sorted(set(plain), key=lambda d: (d.size, d.value)):
        if all(candidate.holds(other) for other in plain):
            return candidate
    return DType.FP32


def lost(source: DType, target: DType) -> tuple[str, ...]:
    """Return the losses of a cast: "range", "precision", both or none."""
    if not (source.is_floating and target.is_floating):
        return () if source is target else ("range", "precision")
    losses = []
    if target.exponent < source.exponent:
        losses.append("range")
    if target.mantissa < source.mantissa:
        losses.append("precision")
    return tuple(losses)
