"""Update statistics: what became of an update, per block while it happens and per parameter on request.

Off by default: a step that is given no `Statistics` pays nothing. A step that is given one fills five
numbers per block of 256 elements, on the way through memory that it makes anyway; blocks of a parameter
that lie on several ranks are added up by whoever owns the ranks.

Invariant: a block's numbers depend on that block alone, and equal the reference's bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COLUMNS = ("moved", "lost", "underflow", "change_squares", "weight_squares")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Room for one step's numbers of one slice."""

    blocks: Tensor
    """fp64, one row per block and a column for each of COLUMNS."""

    @staticmethod
    def empty(blocks: int, device: torch.device | str = "cpu") -> Statistics:
        return Statistics(torch.zeros(blocks, len(COLUMNS), dtype=torch.float64, device=device))


@dataclass(frozen=True, slots=True)
class UpdateSummary:
    """One parameter's step, or any set of blocks."""

    moved: int
    """Elements that the update wanted to change."""
    lost: int
    """Of those, the ones whose visible weight has the same bits as before."""
    underflow: int
    """Elements with a gradient whose last moment, as it is stored, is zero."""
    change_norm: float
    """Norm of the wanted change, before rounding."""
    weight_norm: float
    """Norm of the master before the step."""

    @property
    def lost_share(self) -> float:
        """0 to 1; 0 where nothing was to change."""
        return self.lost / self.moved if self.moved else 0.0

    @property
    def ratio(self) -> float:
        """The wanted change over the weight; infinity where the weight is zero and the change is not."""
        if self.weight_norm == 0:
            return math.inf if self.change_norm else 0.0
        return self.change_norm / self.weight_norm


def summarize(rows: Tensor) -> UpdateSummary:
    """Add up rows of `Statistics.blocks`, in their order. Reads them to the host."""
    moved, lost, underflow, change, weight = rows.double().sum(0).tolist()
    return UpdateSummary(int(moved), int(lost), int(underflow), math.sqrt(change), math.sqrt(weight))
