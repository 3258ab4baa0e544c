"""Decide which units a training step gathers, and in which order: the position of a step among the units.

A model may skip a unit on one rank: an expert without tokens, a layer that is dropped. The other ranks gather
that unit, and a rank that skipped it would mistake its next collective for this one. So a training step goes
through all units in one order, the plan's or a learned one. Units that a forward has
passed by are gathered too, and count as over in a backward. Units are gathered ahead as far as there is room
(`plan/schedule.py`). The hooks of `step/gather.py` call this.

Invariant: in training, the gathers and reductions of a rank that runs units in the plan's order, and each at
most once, are the plan's list. A unit that runs out of turn, or again, is gathered on the spot.

[Note: nested units] A recomputed block runs the units inside it forward, and needs them again at once in
reverse order. So all of them are gathered when a backward comes to the block, also those that this rank does
not use.

[Note: order on all ranks] Ranks that run units in different orders would mix their weights. A checksum of the
units that were gathered, in their order, travels with the norm (`norm.global_norm`).

[Note: learned order] A model may define its units in another order than it runs them, and each rank may drop
other ones at random. Until every unit has run on some rank, ranks exchange at the end of a forward the order
in which they ran theirs. From then on all go through the units in that order, which is the plan's if no rank
reports another. Until then, a rank that comes to a unit out of turn first goes through all units that are
left, as the other ranks do at the end of their forwards. Then all ranks gather what any of them wants. Units
that run several times in a forward have no place in such an order: no unit may be dropped around them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zerodrift.plan import backward_order, contains, prefetch_ends

LiveUnit = Any
"""`step/gather.py` has the class, and imports this file."""


def will_be_recomputed() -> bool:
    """Return whether activation checkpointing is around the running forward of a training step. Private in
    torch (2.13 to 2.15)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return not torch.is_grad_enabled() or hooks is not None


class Traversal:
    """The position of a step among the units of an engine."""

    def __init__(self, units: Sequence[LiveUnit], order: UnitOrder | None = None, room: int = 0) -> None:
        """`order` is None where gathers need no other rank. `room` is the number of bytes that may be
        gathered at once, if that is more than a unit and the next."""
        self.gradients: Any = None
        """The engine's `Gradients`, which reduce a unit when its backward is over."""
        self.checksum = 0
        """See [Note: order on all ranks]. The engine clears it in every step."""
        self.under_way: list[LiveUnit] = []
        """Units whose forward is running, the innermost last."""
        self._room = room
        self._order = order
        """None when the order is final."""
        self._arrange([unit for unit in units if not unit.is_root])
        self._walking = False
        """Whether a forward of the root is running, so that units have a next one."""
        self._training = False
        self._went = 0
        """Units of `_forth` that the forward has passed."""
        self._ran: dict[int, None] = {}
        """Units that this training forward has run, in their order."""
        self.repeats = False
        """Whether a unit ran again under activation checkpointing, so that it may have several backwards."""
        self._came = 0
        """Units of `_back` that the backward has passed."""
        self._silent: dict[LiveUnit, None] = {}
        """Units whose backward has begun, and that have no hook at its end."""
        self.reached: frozenset[int] | None = None
        """Trained units whose gradients this backward adds to; None where it adds to none. Other units that
        ran forward count as over in their turn."""

    def _arrange(self, forth: list[LiveUnit]) -> None:
        self._forth = forth
        by_name = {unit.spec.name: unit for unit in forth}
        self._back = [by_name[spec.name] for spec in backward_order([unit.spec for unit in forth])]
        self._forth_place = {unit.number: place for place, unit in enumerate(forth)}
        self._back_place = {unit.number: place for place, unit in enumerate(self._back)}
        self._inside = {
            block.number: [
                other for other in self._back if other is not block and contains(block.spec, other.spec)
            ]
            for block in self._back
        }
        self._nested = {other.number for inside in self._inside.values() for other in inside}
        self._forth_reach = prefetch_ends([unit.gathered_bytes for unit in forth], self._room)
        self._back_reach = prefetch_ends([unit.gathered_bytes for unit in self._back], self._room)
        trained = [place for place, unit in enumerate(self._back) if unit.trained]
        self._until = trained[-1] + 1 if trained else 0
        """Length of `_back` up to its last trained unit."""

    def gathered(self, unit: LiveUnit) -> None:
        # Below 2^40, so that a sum over ranks stays far below 2^63.
        self.checksum = (self.checksum * 1_000_003 + unit.number + 1) % (1 << 40)

    # --- forward ----------------------------------------------------------------------------------------

    def enter(self, training: bool) -> None:
        """Begin the root's forward. Unless it is training, units are gathered only where they are used."""
        self._walking, self._training, self._went = True, training, 0
        if training:
            self._ran.clear()
            self.repeats = False

    def forward(self, unit: LiveUnit) -> None:
        if not self._walking or unit.is_root:
            unit.gather()
            return
        place = self._forth_place[unit.number]
        if self._training:
            unit.recomputed = will_be_recomputed()
            self.repeats |= unit.recomputed and unit.number in self._ran
            self._ran[unit.number] = None
            if self._order is not None and place < self._went and not unit.is_full:
                self._pass_by(len(self._forth))
                self._order.gather_wanted(unit.number)
            self._pass_by(place)
        self._go(place)

    def leave(self) -> None:
        if self._walking and self._training:
            self._pass_by(len(self._forth))
            if self._order is not None:
                self._order.end_forward(self._ran)
                if self._order.units != self._forth:
                    self._arrange(self._order.units)
                if self._order.is_final:
                    self._order = None
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

    # --- backward ---------------------------------------------------------------------------------------

    def turn(self) -> None:
        self._walking = False
        self._came = 0
        self._silent.clear()
        self.reached = None

    def is_over(self, unit: LiveUnit) -> bool:
        """Return whether the unit's backward is over when a gradient leaves its input. It is not if the input
        was used elsewhere too, and this backward does not use the unit."""
        if unit.is_root or unit.recomputed or self._back_place[unit.number] < self._came:
            return True
        if self.reached is None or unit.number not in self.reached:
            return False
        self._come_back(unit)
        return True

    def ends_with_the_next(self, unit: LiveUnit) -> None:
        """Record a unit whose backward has begun, and that has no hook at its end."""
        if not unit.is_root:
            self._silent[unit] = None

    def _end_silent(self, following: LiveUnit | None = None) -> None:
        for unit in list(self._silent):
            if following is None or not (unit is following or contains(unit.spec, following.spec)):
                del self._silent[unit]
                unit.backward_is_over()

    def backward(self, unit: LiveUnit) -> None:
        self._end_silent(unit)
        self._come_back(unit)

    def _come_back(self, unit: LiveUnit) -> None:
        if unit.is_root:
            unit.gather()
            if self._came == 0:
                for first in self._back[:1]:
                    first.start_gather()
            return
        place = self._back_place[unit.number]
        self._pass_back(place)
        self._come(place)

    def end(self) -> None:
        """Pass all remaining units at the end of a backward."""
        self._end_silent()
        self._pass_back(self._until)

    def has_come(self, unit: LiveUnit) -> bool:
        """Return whether the running backward has reached a unit."""
        return unit.is_root or self._back_place[unit.number] < self._came

    def recompute(self, unit: LiveUnit) -> None:
        """Gather a unit that a recomputed forward uses."""
        if unit.number in self._nested:
            unit.gather()  # its turn comes later
        else:
            self._come_back(unit)

    def _pass_back(self, until: int) -> None:
        for place in range(self._came, until):
            unit = self._back[place]
            to_come = unit.uses > 0
            if self.reached is not None and unit.trained:
                to_come = unit.number in self.reached
            if to_come:
                continue  # a backward will come to it out of turn
            self._come(place)
            self.gradients.over(unit)
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


# --- the learned order ------------------------------------------------------------------------------------


class UnitOrder:
    """The order of all units except the root, as far as forwards have shown it."""

    def __init__(self, units: Sequence[LiveUnit], exchange: Callable[[Any], list[Any]]) -> None:
        """`exchange` returns the values that all ranks call it with."""
        self.units = [unit for unit in units if not unit.is_root]
        self.is_final = False
        """Whether forwards need no exchange any more."""
        self._exchange = exchange
        self._by_number = {unit.number: unit for unit in self.units}
        self._not_run = set(self._by_number)
        """Units that have run on no rank yet."""
        self._pairs = {
            (outer.number, inner.number)
            for outer, inner in itertools.permutations(self.units, 2)
            if contains(outer.spec, inner.spec)
        }
        """(first, second) units of which the first runs before the second."""

    def end_forward(self, ran: Iterable[int]) -> None:
        """Gather what other ranks want until their forwards have ended, and learn from the orders of all
        ranks. `ran` are the units that this rank has run."""
        while not (orders := self.gather_wanted(None, ran)):
            pass
        self._pairs.update(pair for order in orders for pair in itertools.pairwise(order))
        self._not_run.difference_update(*orders)
        numbers = sort_by_pairs([unit.number for unit in self.units], self._pairs)
        if numbers is not None:
            self.units = [self._by_number[number] for number in numbers]
        # If no order suits all ranks, a difference between them is an error from now on.
        self.is_final = numbers is None or not self._not_run

    def gather_wanted(self, own: int | None, ran: Iterable[int] = ()) -> list[tuple[int, ...]]:
        """Gather the units that any rank wants, on all ranks. Return the orders of all ranks if no rank wants
        one."""
        reports = self._exchange((own, tuple(ran)))
        wanted = {number for number, _ in reports if number is not None}
        for number in sorted(wanted):
            self._by_number[number].gather()
            if number != own:
                self._by_number[number].leave()
        return [] if wanted else [order for _, order in reports]


def sort_by_pairs(numbers: Sequence[int], pairs: Iterable[tuple[int, int]]) -> list[int] | None:
    """Sort numbers so that the first of each pair comes before the second, and otherwise keep their order.
    Return None if no order does."""
    before: dict[int, set[int]] = {number: set() for number in numbers}
    for first, second in pairs:
        before[second].add(first)
    order: dict[int, None] = {}
    while len(order) < len(before):
        ready = (number for number in before if number not in order and before[number] <= order.keys())
        following = next(ready, None)
        if following is None:
            return None
        order[following] = None
    return list(order)
