"""What the engine asks of an optimizer.

The engine hands over what this rank owns: per segment a flat piece of storage and the first master.
From then on masters and moments live here, in the scheme and dtype of the plan's rows. An `Updater` sees
flat reduced gradients and one multiplier; it never sees a collective, a loss scale or a clip value.

Invariant: after `update`, owned storage is the master rounded once to the storage dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from zerodrift.dtypes import BLOCK
from zerodrift.optim.schemes import Scheme
from zerodrift.optim.statistics import Statistics
from zerodrift.plan.table import Plan, Row, Segment
from zerodrift.policy.nouns import Update


@dataclass(frozen=True, slots=True)
class Owned:
    """The part of a segment that this rank updates."""

    number: int
    """Index into `Plan.segments`."""
    spec: Segment
    update: Update
    """The columns of its update."""
    rows: tuple[Row, ...]
    storage: torch.Tensor
    """Flat, in the storage dtype; written by every update."""
    initial: torch.Tensor
    """The first master, free to be kept: flat fp32 values, or for a split one its low halves (int16), whose
    high ones storage holds. Without a master of its own: storage itself."""
    start: int
    """Where the piece begins in the segment."""
    part: int = 0
    """Which of its parts, of a row that is in several (`Row.parts`)."""

    def without_values(self) -> Owned:
        """The same piece, for whoever has taken the values and must not keep them alive."""
        return replace(self, initial=self.initial.new_empty(0))

    def span(self, row: Row) -> slice:
        """The part of `row` that is in this piece, as a slice of the piece; may be empty."""
        low = max(row.offset - self.start, 0)
        high = min(row.offset + row.numel - self.start, self.storage.numel())
        return slice(low, max(low, high))


def scheme_of(piece: Owned) -> Scheme:
    """The columns that an update of a piece obeys."""
    return Scheme(piece.spec.columns.storage.dtype, piece.update.master, piece.update.state)


def empty_statistics(plan: Plan, owned: Sequence[Owned]) -> dict[int, Statistics]:
    """Room for statistics by segment number; none where the plan does not ask for them."""
    if not plan.policy.statistics:
        return {}
    return {
        piece.number: Statistics.empty(-(-piece.storage.numel() // BLOCK), piece.storage.device)
        for piece in owned
    }


Counters = dict[str, dict[str, Any]]
"""What of an optimizer's state is not one number per element: step counts and the like, by parameter name,
under `""` what holds for all. Numbers, strings, None and tensors."""


Written = Callable[[int], None]
"""Told the number of a piece as soon as its storage holds what an update makes of it."""


def no_callback(number: int) -> None:
    """A `Written` for whoever waits for no single piece."""


class OptimizerState(Protocol):
    """An optimizer of any backend, as it is read, saved and filled: per segment, in flat pieces."""

    groups: torch.optim.Optimizer
    """Parameter groups with their learning rates, for schedules."""

    @property
    def kind(self) -> str:
        """What the moments mean: the name of the algorithm or of torch's class."""

    @property
    def group_of(self) -> Mapping[str, int]:
        """Row name -> its parameter group. Trained rows that the optimizer was not given are not in it."""

    @property
    def statistics(self) -> Mapping[int, Statistics]:
        """What became of the last update, by segment number; empty unless the plan asks for it."""

    def learning_rates(self) -> tuple[float, ...]:
        """Of each parameter group, now."""

    def master(self, number: int) -> torch.Tensor:
        """The fp32 values of an owned piece; a copy."""

    def set_master(self, number: int, values: torch.Tensor) -> None:
        """Replace them; storage follows."""

    def states(self, number: int) -> dict[str, torch.Tensor]:
        """The moments of an owned piece, flat and fp32, by torch's names; copies."""

    def set_state(self, number: int, key: str, values: torch.Tensor) -> None:
        """Replace one of them."""

    def counters(self) -> Counters:
        """The rest of the state, of parameters that this rank owns something of."""

    def set_counters(self, counters: Counters) -> None:
        """Take it back, before `set_state`; there may be more of it than is needed here. Afterwards every
        moment is zero."""

    def moment_names(self, name: str, counters: Counters) -> tuple[str, ...]:
        """The moments that a parameter has, for an optimizer with such counters."""

    def resting(self, number: int) -> tuple[torch.dtype | None, tuple[torch.dtype, ...]]:
        """In which dtypes a piece's master (None: storage itself) and its moments really lie in memory."""


class Updater(OptimizerState, Protocol):
    """An optimizer as the native engine runs it."""

    def leave_alone(self, names: Collection[str]) -> None:
        """Rows that the next update leaves as they are, with their moments and their own count of steps."""

    def update(
        self, gradients: Mapping[int, torch.Tensor], multiplier: float, written: Written = no_callback
    ) -> None:
        """One step. Flat gradients of owned pieces by segment number; each is multiplied once, in fp32.
        A gradient may be asked for until its piece is `written`, and not after it."""
