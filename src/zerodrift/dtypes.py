"""Names, sizes and ranges of dtypes, and what is lost on the way from one to another.

Torch is not imported here: the whole line from config to plan runs without it. `DType.torch` is the one
bridge, crossed by the rooms that hold tensors. The exact hi/lo split of an fp32 value lives with the
updates in `optim`, which is where bits are moved.

Invariant: a dtype has one short name (`bf16`), used in config keys, tables, errors and docs.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerodrift.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Format:
    size: int
    """Bytes."""
    exponent: int
    """Exponent bits; 0 for what is not floating."""
    mantissa: int
    """Stored mantissa bits; 0 for what is not floating."""
    torch: str
    """The attribute of `torch`."""
    safetensors: str
    """The name in a safetensors header."""


class DType(enum.Enum):
    """One dtype; the value is its short name."""

    __hash__ = object.__hash__  # members are alone; that of `Enum` is a call for each look into a table
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

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return self.value

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return _FORMATS[self].size

    @property
    def is_floating(self) -> bool:
        return _FORMATS[self].exponent > 0

    @property
    def mantissa(self) -> int:
        """Stored mantissa bits: half an ulp of 1.0 is 2 ** -(mantissa + 1)."""
        return _FORMATS[self].mantissa

    @property
    def exponent(self) -> int:
        """Exponent bits, the range."""
        return _FORMATS[self].exponent

    @property
    def safetensors(self) -> str:
        return _FORMATS[self].safetensors

    @functools.cached_property
    def torch(self) -> torch.dtype:
        """The torch dtype. Imports torch."""
        import torch

        return getattr(torch, _FORMATS[self].torch)

    def holds(self, other: DType) -> bool:
        """Whether every value of `other` is a value of this dtype."""
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

_SPELLINGS: dict[str, DType] = {
    **{dtype.value: dtype for dtype in DType},
    **{form.torch: dtype for dtype, form in _FORMATS.items()},
    "float": DType.FP32,
    "half": DType.FP16,
    "double": DType.FP64,
}

_TRAINING = (DType.FP32, DType.BF16, DType.FP16)

ADMITTED: Mapping[str, tuple[DType, ...]] = {
    "storage": _TRAINING,
    "gather": _TRAINING,
    "compute": _TRAINING,
    "grad": _TRAINING,
    "accumulate": _TRAINING,
    "reduce.wire": _TRAINING,
    "reduce.sum": _TRAINING,
    "export": _TRAINING,
    "buffers": _TRAINING,
}
"""What a config may say for a column, whichever key says it. `master` and `state` have words of their own."""


BLOCK = 256
"""Elements. Parameters start on multiples of it, and every slice is a multiple of it, so a block of 256
elements of one parameter is never cut: what is computed per block (a partial norm, the scale of an `8bit`
moment, a key of random rounding) does not depend on the stage."""


def spellings(dtypes: Sequence[DType]) -> list[str]:
    """Every accepted spelling of the given dtypes, short names first."""
    return sorted(
        (text for text, dtype in _SPELLINGS.items() if dtype in dtypes),
        key=lambda text: (text not in DType._value2member_map_, text),
    )


def parse(text: str) -> DType:
    """`"bf16"`, `"bfloat16"`, `"torch.bfloat16"` -> `DType.BF16`."""
    dtype = _SPELLINGS.get(text.strip().lower().removeprefix("torch."))
    if dtype is None:
        raise ConfigError("dtype", "must be known", got=repr(text), do=did_you_mean(text, _SPELLINGS))
    return dtype


def from_safetensors(text: str) -> DType | None:
    """The dtype of a safetensors header, or None for one that zerodrift does not know."""
    for dtype, form in _FORMATS.items():
        if form.safetensors == text:
            return dtype
    return None


def from_torch(dtype: torch.dtype) -> DType | None:
    """The dtype of a tensor, or None for one that zerodrift does not know."""
    return _SPELLINGS.get(str(dtype).removeprefix("torch."))


def widest(dtypes: tuple[DType, ...]) -> DType:
    """The narrowest training dtype that holds all of the given ones (bf16 and fp16 meet in fp32)."""
    for candidate in sorted(set(dtypes), key=lambda d: (d.size, d.value)):
        if all(candidate.holds(other) for other in dtypes):
            return candidate
    return DType.FP32


def lost(source: DType, target: DType) -> tuple[str, ...]:
    """What a cast may lose: a subset of ("range", "precision"), empty when the cast is exact."""
    if not (source.is_floating and target.is_floating):
        return () if source is target else ("range", "precision")
    losses = []
    if target.exponent < source.exponent:
        losses.append("range")
    if target.mantissa < source.mantissa:
        losses.append("precision")
    return tuple(losses)
