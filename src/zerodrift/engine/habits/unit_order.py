"""Learn the order in which a model runs its units, where it differs from the order of their definition.

A model may define its units in another order than it runs them, and each rank may drop other ones at random.
Until every unit has run on some rank, ranks exchange at the end of a forward the order in which they ran
theirs. From then on all go through the units in that order, which is the plan's where no rank reports
another. Until then, a rank that comes to a unit out of turn first goes through all units that are left, as
the other ranks do at the end of their forwards. Then all ranks gather what any of them wants. Units that run
several times in a forward have no place in such an order: no unit may be dropped around them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from zerodrift.plan import contains

U = TypeVar("U", bound=Any)
"""The engine's `LiveUnit`."""


class UnitOrder(Generic[U]):
    """The order of all units except the root, as far as forwards have shown it."""

    def __init__(self, units: Sequence[U], exchange: Callable[[Any], list[Any]]) -> None:
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
