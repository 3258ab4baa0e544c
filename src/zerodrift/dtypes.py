"""Names, sizes and ranges of dtypes and narrow formats, and the losses of casts between them.

A narrow format (`formats.py`) is a dtype whose elements share scales. It has bytes for a number of elements,
and no size of one element. Only `DType.torch` imports torch, because planning runs without torch.

Invariant: a dtype has one short name (`bf16`), used in config keys, tables, errors and docs.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerodrift.errors import ConfigError, did_you_mean
from zerodrift.formats import Element, Format

if TYPE_CHECKING:
    import torch


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
    NF4_64 = "nf4-64"
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
    DType.NF4_64: Format(Element.NF4, 64),
    DType.MXFP8: Format(Element.E4M3, 32, "e8m0", "floor"),
    DType.MXFP4: Format(Element.E2M1, 32, "e8m0", "floor"),
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
"""Words of a config for the usual format of an element: the first that a column admits."""

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
    "reduce.wire": (*_TRAINING, *_FLAT, DType.E5M2_128, DType.INT4_128),
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
    words += [text for text, formats in SHORT.items() if any(dtype in dtypes for dtype in formats)]
    return sorted(words, key=lambda text: (text not in DType._value2member_map_, text))


def parse(text: str) -> DType:
    """Parse a dtype: `bf16`, `bfloat16`, `torch.bfloat16` -> `DType.BF16`."""
    dtype = _SPELLINGS.get(text.strip().lower().removeprefix("torch."))
    if dtype is None:
        raise ConfigError("dtype", "must be known", got=repr(text), do=did_you_mean(text, _SPELLINGS))
    return dtype


def word(dtype: DType) -> str:
    """Return the shortest word for a dtype in a config."""
    return next((short for short, formats in SHORT.items() if dtype in formats), dtype.value)


def parse_among(text: str, dtypes: Sequence[DType]) -> DType:
    """Parse one of these dtypes, where `fp8` and the like are the usual format of that element."""
    usual = (dtype for dtype in SHORT.get(text.strip().lower(), ()) if dtype in dtypes)
    return next(usual, None) or parse(text)


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
