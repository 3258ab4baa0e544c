"""Update statistics: which part of an update was kept, lost or not seen, per block of 256 elements.

Off by default: a step without a `Statistics` pays nothing. A step with one fills six numbers per block, on
the way through memory that it makes anyway. `engine/step/update.py` adds the blocks of a parameter.

Invariant: a block's numbers depend on that block alone, and equal the reference's bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zerodrift.kernels.squares import reference_square_sums

COLUMNS = ("moved", "unseen", "lost", "underflow", "change_squares", "weight_squares")
"""Elements that the update wanted to change; of those, the ones whose visible weight has the same bits as
before, and the ones whose master has too; elements with a gradient whose last moment is stored as zero; and
the sums of squares of the wanted change and of the master before it."""

Before = tuple[Tensor, Tensor, Tensor]
"""Master in fp32, visible weight and scaled gradient before an update, all flat."""

After = tuple[Tensor, Tensor, Tensor | None]
"""Master in fp32, visible weight and the last moment, as they are kept after it; None for no moment."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Room for one step's numbers of one slice."""

    blocks: Tensor
    """fp64, one row per block and a column for each of COLUMNS."""

    @staticmethod
    def empty(blocks: int, device: torch.device | str = "cpu") -> Statistics:
        return Statistics(torch.zeros(blocks, len(COLUMNS), dtype=torch.float64, device=device))


def account(out: Tensor, change: Tensor, before: Before, after: After) -> None:
    """Fill the numbers of each block from `change`, which the update wanted to add. The definition."""
    (weight, seen, gradient), (kept, visible, moment) = before, after
    moved = change != 0
    unseen = moved & _same(seen, visible)
    lost = unseen & _same(weight, kept)
    underflow = torch.zeros_like(moved) if moment is None else (gradient != 0) & (moment == 0)
    for column, marked in enumerate((moved, unseen, lost, underflow)):
        # Sums of squares of zeros and ones are counts.
        out[:, column] = reference_square_sums(marked.float())
    out[:, 4] = reference_square_sums(change)
    out[:, 5] = reference_square_sums(weight)


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask of the elements whose bits are the same."""
    bits = torch.int32 if one.dtype is torch.float32 else torch.int16
    return one.view(bits) == other.view(bits)
