"""The interface between an engine and its optimizer.

The engine passes the shards of this rank: per segment a flat piece of storage and the first master. After
that, masters and moments live in the updater, in the scheme and dtype of the plan's rows. An `Updater` sees
flat reduced gradients and one multiplier; it never sees a collective, a loss scale or a clip value.

Invariant: after `update`, owned storage is the master rounded once to the storage dtype.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

from zerodrift.dtypes import BLOCK
from zerodrift.errors import UnsupportedError
from zerodrift.optim.schemes import Scheme
from zerodrift.optim.updates import room_for_statistics
from zerodrift.plan import Plan, Row, Segment
from zerodrift.policy import Update


@dataclass(frozen=True, slots=True)
class Owned:
    """The part of a segment that this rank updates."""

    number: int
    """Index into `Plan.segments`."""
    spec: Segment
    update: Update
    rows: tuple[Row, ...]
    storage: torch.Tensor
    """Flat, in the storage dtype; written by every update."""
    initial: torch.Tensor
    """The first master, which the updater may keep: flat fp32 values, or the low halves (int16) of a split
    master, whose high halves are storage. Without a separate master: storage itself."""
    start: int
    """The first element of the segment that is in the piece."""
    part: int = 0
    """The number of its part, for rows in several parts (`Row.parts`)."""

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.spec.columns.storage.dtype, self.update.master, self.update.state)

    def without_values(self) -> Owned:
        """Return the same piece without the first master, to free its memory."""
        return replace(self, initial=self.initial.new_empty(0))

    def span(self, row: Row) -> slice:
        """Return the part of `row` in this piece, as a slice of the piece; may be empty."""
        return row.within(self.start, self.storage.numel())


def empty_statistics(plan: Plan, owned: Sequence[Owned]) -> dict[int, torch.Tensor]:
    """Return statistics by segment number; empty unless the plan asks for them."""
    if not plan.policy.statistics:
        return {}
    return {
        piece.number: room_for_statistics(-(-piece.storage.numel() // BLOCK), piece.storage.device)
        for piece in owned
    }


Counters = dict[str, dict[str, Any]]
"""State that is not one number per element, such as step counts: by parameter name, with `""` for all
parameters. Numbers, strings, None and tensors."""

Written = Callable[[int], None]
"""A callback with the number of a piece, as soon as its storage holds the updated values."""


def no_callback(number: int) -> None:
    """Do nothing: a `Written` for a caller that does not wait for single pieces."""


class OptimizerState(Protocol):
    """An optimizer of any backend, as schedules and checkpoints see it."""

    groups: torch.optim.Optimizer
    """Parameter groups with their learning rates, for schedules."""

    kind: str
    """The name of the algorithm or of torch's class, which says what the moments mean."""
    group_of: Mapping[str, int]
    """Row name -> parameter group, without trained rows that the optimizer was not given."""

    def counters(self) -> Counters:
        """Return the rest of the state, of parameters that this rank owns a part of."""

    def set_counters(self, counters: Counters) -> None:
        """Load counters, before moments; surplus ones are ignored. Every moment is zero afterwards."""

    def moment_names(self, name: str, counters: Counters) -> tuple[str, ...]:
        """Return the moments of a parameter in an optimizer with such counters."""


def learning_rates(optimizer: OptimizerState | None) -> tuple[float, ...]:
    """Return the learning rate of each parameter group; none without an optimizer."""
    rates = [] if optimizer is None else [group["lr"] for group in optimizer.groups.param_groups]
    try:
        return tuple(map(float, rates))
    except (TypeError, ValueError, RuntimeError):
        where = "optimizer.param_groups"
        raise UnsupportedError(where, "must each have a number as `lr`", got=repr(rates)) from None


def refuse_calls(optimizer: torch.optim.Optimizer, names: Iterable[str], must: str, do: str) -> None:
    """Make methods of an optimizer raise that would silently do nothing."""

    def refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"optimizer.{name}", must, got="a call", do=do)

    for name in names:
        setattr(optimizer, name, partial(refuse, name))


class GroupMembers:
    """The groups of an optimizer, and their parameters, when the engine was made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._members()

    def _members(self) -> list[list[Any]]:
        return [[group, *group["params"]] for group in self._optimizer.param_groups]

    def require_unchanged(self) -> None:
        """Raise if a group was replaced or has other parameters: the engine would go on updating the old
        ones."""
        both = itertools.zip_longest(self._members(), self._before, fillvalue=list[Any]())
        for number, (now, before) in enumerate(both):
            if len(now) != len(before) or any(map(operator.is_not, now, before)):
                kept = sum(map(operator.is_, now[1:], before[1:]))
                must = "must be the group that the engine was made with, with the same parameters in order"
                got = f"{len(now[1:])}, of which {kept} are in the place of one of {len(before[1:])}"
                do = "Build a new engine, or set the group's `lr` to 0 to keep its parameters unchanged."
                raise UnsupportedError(f"optimizer.param_groups[{number}]", must, got=got, do=do)


class Updater(OptimizerState, Protocol):
    """An optimizer as the native engine runs it, with its values per segment, in flat pieces."""

    @property
    def statistics(self) -> Mapping[int, torch.Tensor]:
        """The statistics of the last update by segment number; empty unless the plan asks for them."""

    def leave_alone(self, names: Collection[str]) -> None:
        """Let the next update skip these rows: weights, moments and step counts stay."""

    def update(
        self, gradients: Mapping[int, torch.Tensor], multiplier: float, written: Written = no_callback
    ) -> None:
        """Take one step with the flat gradients of owned pieces, by segment number.

        Each is multiplied once, in fp32. A gradient may be read until its piece is `written`, and not later.
        """

    def master(self, number: int) -> torch.Tensor:
        """Return a copy of the fp32 values of an owned piece."""

    def set_master(self, number: int, values: torch.Tensor) -> None:
        """Replace the fp32 values and round storage from them."""

    def states(self, number: int) -> dict[str, torch.Tensor]:
        """Return copies of the moments of an owned piece, flat and fp32, by torch's names."""

    def set_state(self, number: int, key: str, values: torch.Tensor) -> None:
        """Replace a moment."""

    def resting(self, number: int) -> tuple[torch.dtype | None, tuple[torch.dtype, ...]]:
        """Return the dtypes of a piece's master (None: storage itself) and of its moments, as stored."""
