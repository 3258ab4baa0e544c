"""Learn the order in which units run, where it is not that of their definition.

[Note: learned order] A model may define its units in another order than it runs them, and drop some at
random, on each rank others. So until every unit has run on some rank, ranks exchange at the end of a forward
the order in which they ran theirs, and from then on go through them in that order: the plan's where no rank
reports another. Until then, a rank that comes to a unit out of turn first goes through all that are left, as
the others do by the end of their forwards; then all gather together what any of them wants. Units that run
several times in a forward have no place of this kind: around them nothing may be dropped.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from zerodrift.plan import contains


class UnitOrder:
    """The order of all units but the root, as far as forwards have shown it."""

    def __init__(self, units: Sequence[Any], exchange: Callable[[Any], list[Any]]) -> None:
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
        """Pairs of units of which the first runs before the second."""

    def gather(self, unit: Any) -> None:
        """Gather a unit that this rank has come to out of turn, with what other ranks want."""
        self._gather_wanted(unit.number)

    def end_forward(self, ran: Iterable[int]) -> None:
        """Gather what other ranks want until all their forwards have ended, and learn from all orders. `ran`
        are the units that this rank has run."""
        while not (orders := self._gather_wanted(None, ran)):
            pass
        self._pairs.update(pair for order in orders for pair in itertools.pairwise(order))
        self._not_run.difference_update(*orders)
        numbers = sort_by_pairs([unit.number for unit in self.units], self._pairs)
        if numbers is not None:
            self.units = [self._by_number[number] for number in numbers]
        # Without an order that serves all, a difference between ranks is an error from now on.
        self.is_final = numbers is None or not self._not_run

    def _gather_wanted(self, own: int | None, ran: Iterable[int] = ()) -> list[tuple[int, ...]]:
        """Gather together what any rank wants; return the orders of all ranks if none wants anything."""
        reports = self._exchange((own, tuple(ran)))
        wanted = {number for number, _ in reports if number is not None}
        for number in sorted(wanted):
            self._by_number[number].gather()
            if number != own:
                self._by_number[number].leave()
        return [] if wanted else [order for _, order in reports]


def sort_by_pairs(numbers: Sequence[int], pairs: Iterable[tuple[int, int]]) -> list[int] | None:
    """Sort numbers so that the first of each pair comes before the second, else as they are; None where no
    order does."""
    places = {number: place for place, number in enumerate(numbers)}
    sorter = TopologicalSorter[int]({number: () for number in numbers})
    for first, second in pairs:
        sorter.add(second, first)
    try:
        sorter.prepare()
    except CycleError:
        return None
    ready: list[tuple[int, int]] = []
    order: list[int] = []
    while sorter.is_active():
        for number in sorter.get_ready():
            heapq.heappush(ready, (places[number], number))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order
