"""Through the units, forward and back: which one is gathered when, whatever the data did.

A model may skip a unit on one rank: an expert without tokens, a layer that is dropped. The others gather
it, and a rank that did not would take the next collective for it. So a training step goes through the units
in the order of the plan: when it comes to one, those that were passed over are gathered too, and in a
backward count as over, in their turn. One unit is gathered ahead.

Invariant: in training, the gathers and reductions of a rank that runs units in the order of the plan, and
each at most once, are the plan's list. A unit that runs out of turn, or again, is gathered on the spot.

[Note: order] Ranks that run units in different orders would still mix their weights. A checksum of what
was gathered, in its order, travels with the norm (`scale.global_norm`), and a difference is an error.

[Note: nested units] A block that is recomputed runs the units inside it forward, and needs them again at
once, in reverse. So they are gathered together when a backward comes to the block, also those that this
rank has no use for; without recomputation, one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from zerodrift.plan.schedule import backward_order, holds

if TYPE_CHECKING:
    from zerodrift.engine.unit import LiveUnit


class Backward(Protocol):
    """What units ask of the step that they are part of."""

    @property
    def counts(self) -> bool:
        """Whether the backward under way adds to gradients of parameters."""

    def forward_begins(self) -> None:
        """A forward begins outside of any backward."""

    def begin(self) -> None:
        """A gradient has arrived at a unit's output; the first call of a backward arms its end."""

    def over(self, unit: LiveUnit) -> None:
        """The unit's gradients have landed."""


def will_be_recomputed() -> bool:
    """Whether activation checkpointing is around a forward that is part of a training step.

    The reentrant kind runs it without gradients, the other kind takes what autograd saves. Private in torch
    (2.13 to 2.15).
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return not torch.is_grad_enabled() or hooks is not None


class Walk:
    """Where a step is among the units of an engine."""

    def __init__(self, units: list[LiveUnit]) -> None:
        self.units = units
        self.checksum = 0
        """See [Note: order]; the engine clears it in every step."""
        self._forth = [unit for unit in units if not unit.is_root]
        by_name = {unit.spec.name: unit for unit in units}
        back = [by_name[spec.name] for spec in backward_order([unit.spec for unit in units])]
        self._back = [unit for unit in back if not unit.is_root]
        self._forth_place = {unit.number: place for place, unit in enumerate(self._forth)}
        self._back_place = {unit.number: place for place, unit in enumerate(self._back)}
        self._inside = {unit.number: self._units_inside(unit) for unit in self._back}
        self._nested = {other.number for inside in self._inside.values() for other in inside}
        trained = [place for place, unit in enumerate(self._back) if unit.trains]
        self._until = trained[-1] + 1 if trained else 0
        """Units of `_back` after it have no gradient."""
        self._walking = False
        """Whether a forward of the root is under way, so that units have a next one."""
        self._training = False
        self._went = 0
        """How many of `_forth` this forward has come past."""
        self._came = 0
        """How many of `_back` this backward has come past."""
        self._reached: frozenset[int] | None = None
        """Trained units whose gradients this backward adds to; None where it adds to none."""
        for unit in units:
            unit.walk = self

    def _units_inside(self, block: LiveUnit) -> list[LiveUnit]:
        return [other for other in self._back if other is not block and holds(block.spec, other.spec)]

    def gathered(self, unit: LiveUnit) -> None:
        """The unit is being gathered with a collective."""
        # Below 2^40, so that a sum over ranks stays far below 2^63.
        self.checksum = (self.checksum * 1_000_003 + unit.number + 1) % (1 << 40)

    # --- forward ----------------------------------------------------------------------------------------

    def enter(self, training: bool) -> None:
        """The root's forward begins. Without gradients, units are gathered where they are used and nowhere
        else: a decoder that generates does not gather its encoder at every token."""
        self._walking, self._training, self._went = True, training, 0

    def forward(self, unit: LiveUnit) -> None:
        """Come to a unit: full when this returns."""
        if not self._walking or unit.is_root:
            unit.gather()
            return
        place = self._forth_place[unit.number]
        if self._training:
            unit.recomputed = will_be_recomputed()
            self._pass_by(place)
        self._go(place)

    def leave(self) -> None:
        """The root's forward ends."""
        if self._walking and self._training:
            self._pass_by(len(self._forth))
        self._walking = False

    def _pass_by(self, until: int) -> None:
        for place in range(self._went, until):
            self._go(place)
            self._forth[place].leave()

    def _go(self, place: int) -> None:
        self._forth[place].gather()
        if place >= self._went:
            self._went = place + 1
            for ahead in self._forth[place + 1 : place + 2]:
                ahead.start_gather()

    # --- backward ---------------------------------------------------------------------------------------

    def turn(self) -> None:
        """A backward begins."""
        self._walking = False
        self._came = 0
        self._reached = None

    def reaches(self, reached: frozenset[int]) -> None:
        """The backward adds to the gradients of these units and of no others: those that came forward and
        are not among them count as over in their turn."""
        self._reached = reached

    def is_over(self, unit: LiveUnit, step: Backward) -> bool:
        """Whether a gradient that goes on from the unit's input means that its backward is over: not where
        that input went elsewhere too, and this backward has no use for the unit."""
        if unit.is_root or unit.recomputed or self._back_place[unit.number] < self._came:
            return True
        if self._reached is None or unit.number not in self._reached:
            return False
        self.backward(unit, step)
        return True

    def _is_to_come(self, unit: LiveUnit) -> bool:
        """Whether this backward, or one that a forward is still owed, will come to the unit out of turn."""
        if self._reached is None or not unit.trains:
            return unit.uses > 0
        return unit.number in self._reached

    def backward(self, unit: LiveUnit, step: Backward) -> None:
        """Come to a unit again: full when this returns."""
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
        """No gradient will come to those that are left."""
        self._pass_back(self._until, step)

    def recompute(self, unit: LiveUnit, step: Backward) -> None:
        """A forward inside a backward comes to a unit."""
        if unit.number in self._nested:
            unit.gather()  # not in its turn, which is to come
        else:
            self.backward(unit, step)

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
            for ahead in self._back[place + 1 : place + 2]:
                ahead.start_gather()
