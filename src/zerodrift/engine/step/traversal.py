"""Decide which unit is gathered when, forward and back, whatever the data did.

A model may skip a unit on one rank: an expert without tokens, a layer that is dropped. The other ranks gather
it, and a rank that did not would take the next collective for it. So a training step goes through the units
in the order of the plan: when it comes to one, those that were passed over are gathered too, and in a
backward count as over, in their turn. Units are gathered ahead as far as there is room (`plan/schedule.py`).

Invariant: in training, the gathers and reductions of a rank that runs units in the order of the plan, and
each at most once, are the plan's list. A unit that runs out of turn, or again, is gathered on the spot.

[Note: order] Ranks that run units in different orders would still mix their weights. A checksum of what
was gathered, in its order, travels with the norm (`scale.global_norm`), and a difference is an error.

[Note: learned order] A model may define its units in another order than it runs them, and drop some at
random, on each rank others. So until every unit has run on some rank, ranks exchange at the end of a forward
the order in which they ran theirs, and from then on go through them in that order: the plan's where no rank
reports another. Until then, a rank that comes to a unit out of turn first goes through all that are
left, as the others do by the end of their forwards; then all gather together what any of them asks for.
Units that run several times in a forward have no place of this kind: around them nothing may be dropped.

[Note: nested units] A block that is recomputed runs the units inside it forward, and needs them again at
once, in reverse. So they are gathered together when a backward comes to the block, also those that this
rank has no use for; without recomputation, one after the other.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from zerodrift.plan.schedule import backward_order, contains, prefetch_ends
from zerodrift.plan.table import Unit


class TraversedUnit(Protocol):
    """A unit with a turn: see `LiveUnit`."""

    number: int
    spec: Unit
    is_root: bool
    uses: int
    recomputed: bool
    gathered_bytes: int

    @property
    def trained(self) -> Sequence[object]: ...
    @property
    def is_full(self) -> bool: ...
    def start_gather(self) -> None: ...
    def gather(self) -> None: ...
    def leave(self) -> None: ...
    def rest(self) -> None: ...
    def backward_is_over(self, backward: Backward) -> None: ...


class Backward(Protocol):
    """The step that units are part of."""

    @property
    def counts(self) -> bool:
        """Whether the running backward adds to gradients of parameters."""

    def forward_begins(self) -> None:
        """Begin a forward outside of any backward."""

    def begin(self) -> None:
        """Begin a backward when a gradient has arrived at a unit's output; the first call arms its end."""

    def over(self, unit: TraversedUnit) -> None:
        """Reduce the unit's gradients, which have landed, in their turn."""


@dataclass(frozen=True, slots=True)
class ForwardReport:
    """A rank's report of a forward; see [Note: learned order]."""

    wants: int | None
    """Number of a unit that it has come to out of turn; None where its forward ends."""
    ran: tuple[int, ...] = ()
    """The units that it has run, in their order; given at the end of a forward."""


Meet: TypeAlias = Callable[[ForwardReport], Sequence[ForwardReport]]
"""Exchanges this rank's report for those of all ranks."""


def in_order(numbers: Iterable[int], before: Iterable[tuple[int, int]]) -> list[int] | None:
    """Order numbers so that the first of each pair comes before the second, else as they are; None where no
    order does."""
    places = {number: place for place, number in enumerate(numbers)}
    after: dict[int, list[int]] = {number: [] for number in places}
    waits = dict.fromkeys(places, 0)
    for first, second in before:
        after[first].append(second)
        waits[second] += 1
    ready = [(place, number) for number, place in places.items() if not waits[number]]
    order: list[int] = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for other in after[number]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, (places[other], other))
    return order if len(order) == len(places) else None


def will_be_recomputed() -> bool:
    """Return whether activation checkpointing is around a forward that is part of a training step. The
    reentrant kind runs it without gradients, the other kind takes what autograd saves. Private in torch (2.13
    to 2.15)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return not torch.is_grad_enabled() or hooks is not None


class Traversal:
    """The position of a step among the units of an engine."""

    def __init__(self, units: Sequence[TraversedUnit], meet: Meet | None = None, room: int = 0) -> None:
        """`meet` is None where gathers need no other rank. `room` is how many bytes may be gathered at once,
        if that is more than a unit and the next."""
        self._room = room
        self.checksum = 0
        """Checksum of [Note: order]; the engine clears it in every step."""
        self._arrange([unit for unit in units if not unit.is_root])
        self.under_way: list[Any] = []
        """Running forwards' units, the innermost last."""
        self._meet = meet
        """None when the order is known; see [Note: learned order]."""
        self._before = {
            (outer.number, inner.number)
            for outer in self._forth
            for inner in self._forth
            if outer is not inner and contains(outer.spec, inner.spec)
        }
        """Pairs of units of which the first runs before the second."""
        self._unseen = {unit.number for unit in self._forth}
        """Units that no rank has run yet."""
        self._ran: list[int] = []
        """Units that this forward has run, in their order."""
        self._walking = False
        """Whether a forward of the root is running, so that units have a next one."""
        self._training = False
        self._went = 0
        """Number of units in `_forth` that this forward has passed."""
        self._once: set[int] = set()
        """Units that this forward in training has come to."""
        self.repeats = False
        """Whether one of them came again under activation checkpointing: it may have several backwards."""
        self._came = 0
        """Number of units in `_back` that this backward has passed."""
        self._silent: dict[TraversedUnit, None] = {}
        """Units that this backward has come to, without a hook at the end of their backward."""
        self._reached: frozenset[int] | None = None
        """Trained units whose gradients this backward adds to; None where it adds to none."""

    def _arrange(self, forth: list[TraversedUnit]) -> None:
        """Set the order of units."""
        self._forth = forth
        by_name = {unit.spec.name: unit for unit in forth}
        self._back = [by_name[spec.name] for spec in backward_order([unit.spec for unit in forth])]
        self._forth_place = {unit.number: place for place, unit in enumerate(self._forth)}
        self._back_place = {unit.number: place for place, unit in enumerate(self._back)}
        self._inside = {unit.number: self._units_inside(unit) for unit in self._back}
        self._forth_reach = prefetch_ends([unit.gathered_bytes for unit in self._forth], self._room)
        self._back_reach = prefetch_ends([unit.gathered_bytes for unit in self._back], self._room)
        self._nested = {other.number for inside in self._inside.values() for other in inside}
        trained = [place for place, unit in enumerate(self._back) if unit.trained]
        self._until = trained[-1] + 1 if trained else 0
        """Units of `_back` behind it have no gradient."""

    def _units_inside(self, block: TraversedUnit) -> list[TraversedUnit]:
        return [other for other in self._back if other is not block and contains(block.spec, other.spec)]

    def gathered(self, unit: TraversedUnit) -> None:
        """Count a gather with a collective in the checksum."""
        # Below 2^40, so that a sum over ranks stays far below 2^63.
        self.checksum = (self.checksum * 1_000_003 + unit.number + 1) % (1 << 40)

    # --- forward ----------------------------------------------------------------------------------------

    def enter(self, training: bool) -> None:
        """Begin the root's forward. Without gradients, units are gathered only where they are used: a decoder
        that generates does not gather its encoder at every token."""
        self._walking, self._training, self._went = True, training, 0
        if training:
            self._once.clear()
            self.repeats = False
        self._ran = []

    def forward(self, unit: TraversedUnit) -> None:
        """Gather a unit that a forward comes to."""
        if not self._walking or unit.is_root:
            unit.gather()
            return
        place = self._forth_place[unit.number]
        if self._training:
            unit.recomputed = will_be_recomputed()
            self.repeats |= unit.recomputed and unit.number in self._once
            self._once.add(unit.number)
            if self._meet is not None:
                self._learn(unit, place)
            self._pass_by(place)
        self._go(place)

    def leave(self) -> None:
        """End the root's forward."""
        if self._walking and self._training:
            self._pass_by(len(self._forth))
            if self._meet is not None:
                self._end_learning(self._meet)
        self._walking = False

    def _pass_by(self, until: int) -> None:
        for place in range(self._went, until):
            self._go(place)
            self._forth[place].leave()

    def _go(self, place: int) -> None:
        self._forth[place].gather()
        if place >= self._went:
            self._went = place + 1
            for ahead in self._forth[place + 1 : self._forth_reach[place]]:
                ahead.start_gather()

    # --- the order, while it is not known; see [Note: learned order] -------------------------------------

    def _learn(self, unit: TraversedUnit, place: int) -> None:
        """Record a unit in the learned order, and serve other ranks where it is out of turn."""
        if unit.number not in self._ran:
            self._ran.append(unit.number)
        if self._meet is not None and place < self._went and not unit.is_full:
            self._pass_by(len(self._forth))
            self._serve(self._meet(ForwardReport(unit.number)), unit.number)

    def _end_learning(self, meet: Meet) -> None:
        """Serve the other ranks at the end of this rank's forward until theirs have ended."""
        while True:
            reports = meet(ForwardReport(None, tuple(self._ran)))
            if all(report.wants is None for report in reports):
                break
            self._serve(reports)
        orders = [report.ran for report in reports]
        self._before |= {pair for ran in orders for pair in itertools.pairwise(ran)}
        self._unseen -= {number for ran in orders for number in ran}
        numbers = in_order([unit.number for unit in self._forth], self._before)
        if numbers is None:
            self._meet = None  # no order serves all: what is not alike on all ranks is an error from now on
            return
        if numbers != [unit.number for unit in self._forth]:
            by_number = {unit.number: unit for unit in self._forth}
            self._arrange([by_number[number] for number in numbers])
        if not self._unseen:
            self._meet = None

    def _serve(self, reports: Sequence[ForwardReport], mine: int | None = None) -> None:
        """Gather what any rank asks for; release what is not this rank's own."""
        by_number = {unit.number: unit for unit in self._forth}
        for number in sorted({report.wants for report in reports if report.wants is not None}):
            by_number[number].gather()
            if number != mine:
                by_number[number].leave()

    # --- backward ---------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Begin a backward."""
        self._walking = False
        self._came = 0
        self._silent.clear()
        self._reached = None

    def reaches(self, reached: frozenset[int]) -> None:
        """Set the units that the backward adds to; those that came forward and are not among them count as
        over in their turn."""
        self._reached = reached

    def is_over(self, unit: TraversedUnit, step: Backward) -> bool:
        """Return whether a gradient that goes on from the unit's input means that its backward is over: not
        where that input went elsewhere too, and this backward has no use for the unit."""
        if unit.is_root or unit.recomputed or self._back_place[unit.number] < self._came:
            return True
        if self._reached is None or unit.number not in self._reached:
            return False
        self._come_back(unit, step)
        return True

    def _is_to_come(self, unit: TraversedUnit) -> bool:
        """Return whether this backward, or a later one of a forward, will come to the unit out of turn."""
        if self._reached is None or not unit.trained:
            return unit.uses > 0
        return unit.number in self._reached

    def ends_with_the_next(self, unit: TraversedUnit) -> None:
        """Record a unit whose backward has begun without a hook at its end."""
        if not unit.is_root:
            self._silent[unit] = None

    def _end_silent(self, step: Backward, following: TraversedUnit | None = None) -> None:
        for unit in list(self._silent):
            if following is None or not (unit is following or contains(unit.spec, following.spec)):
                del self._silent[unit]
                unit.backward_is_over(step)

    def backward(self, unit: TraversedUnit, step: Backward) -> None:
        """Gather a unit that a backward comes to."""
        self._end_silent(step, unit)
        self._come_back(unit, step)

    def _come_back(self, unit: TraversedUnit, step: Backward) -> None:
        if unit.is_root:
            unit.gather()
            if self._came == 0:
                for first in self._back[:1]:
                    first.start_gather()
            return
        place = self._back_place[unit.number]
        self._pass_back(place, step)
        self._come(place)

    def end(self, step: Backward) -> None:
        """Pass all units that are left at the end of a backward."""
        self._end_silent(step)
        self._pass_back(self._until, step)

    def has_come(self, unit: TraversedUnit) -> bool:
        """Return whether the running backward has reached a unit."""
        return unit.is_root or self._back_place[unit.number] < self._came

    def recompute(self, unit: TraversedUnit, step: Backward) -> None:
        """Gather a unit that a recomputed forward comes to."""
        if unit.number in self._nested:
            unit.gather()  # not in its turn, which is to come
        else:
            self._come_back(unit, step)

    def _pass_back(self, until: int, step: Backward) -> None:
        for place in range(self._came, until):
            unit = self._back[place]
            if self._is_to_come(unit):
                continue
            self._come(place)
            step.over(unit)
            unit.rest()

    def _come(self, place: int) -> None:
        unit = self._back[place]
        unit.gather()
        if place >= self._came:
            self._came = place + 1
            for inside in self._inside[unit.number] if unit.recomputed else ():
                inside.start_gather()
            for ahead in self._back[place + 1 : self._back_reach[place]]:
                ahead.start_gather()
