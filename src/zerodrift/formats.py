"""Narrow formats as data: an element of 4 or 8 bits, the block that shares a scale, the rule of the scale.

`kernels/narrow.py` computes with them; docs/precision.md defines each by a formula and examples. Nothing here
imports torch.

Invariant: blocks begin where a parameter begins, or with each of its rows. So no slicing, stage or number of
ranks changes a code or a scale.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


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

ScaleRule = Literal["exact", "floor", "ceil"]
"""The scale of a block with largest magnitude `amax`: `amax / largest` in fp32; or a power of two, either the
one of the OCP's microscaling formats, `2^(floor(log2 amax) - floor(log2 largest))`, or the least that is not
below `amax / largest`."""


Block = int | tuple[int, int] | Literal["row", "tensor"]


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """A definition of how values rest or travel in few bits."""

    element: Element
    block: Block
    """Consecutive elements of the flattened parameter; or (rows, columns) of the last two dimensions, cut at
    the edges; or a row of the last dimension; or all of it."""
    scale: Literal["fp32", "e8m0"] = "fp32"
    rule: ScaleRule = "exact"

    @property
    def is_flat(self) -> bool:
        """Whether blocks are runs of elements, so that a slice of whole blocks is encoded alone."""
        return isinstance(self.block, int)

    @property
    def scale_bytes(self) -> int:
        return 4 if self.scale == "fp32" else 1

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
        """Return whether a flat format holds the codes of a source as they are: every block lies in one block
        of the source, whose numbers are the same. `columns` is the source's last dimension."""
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
        rule = {"exact": "an fp32 scale", "floor": "a power of two (floor)", "ceil": "a power of two (ceil)"}
        return f"{element} in {blocks} with {rule[self.rule]}"
