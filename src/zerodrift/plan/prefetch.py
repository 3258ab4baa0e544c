"""How far ahead units are gathered: by bytes, so that many small units hide a wait as well as one large one.

The unit that runs and those that are gathered ahead of it share the room that the plan gives them. Without a
word in the config that is what the largest two neighbours take, which is needed in any case: then gathering
further ahead costs no memory at the peak.

Invariant: at least one unit is gathered ahead, whatever it takes; and what is gathered when depends on the
plan and the order of units alone, so it is the same on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from zerodrift.plan.table import Plan, Unit


def gathered_bytes(plan: Plan, unit: Unit) -> int:
    """Of a unit's unsharded copy: what is gathered, and the cast where compute is another dtype."""
    total = 0
    for number in unit.segments:
        segment = plan.segments[number]
        columns = segment.columns
        if columns.storage.axis and plan.slices(segment) > 1:
            total += segment.padded * columns.gather.size
            total += segment.padded * columns.compute.size if columns.compute is not columns.gather else 0
        elif columns.storage.dtype is not columns.compute:
            total += segment.padded * columns.compute.size
    return total


def room(plan: Plan) -> int:
    """Bytes that the unit that runs and those ahead of it may take together."""
    if plan.policy.sharding.prefetch:
        return plan.policy.sharding.prefetch
    sizes = [gathered_bytes(plan, unit) for unit in plan.units if unit.name]
    return max((sum(pair) for pair in itertools.pairwise(sizes)), default=0)


def reach(sizes: Sequence[int], room: int) -> tuple[int, ...]:
    """Of each unit in an order, by their bytes: the place behind the last that is gathered when it runs."""
    places, end, held = [], 0, 0
    for place, size in enumerate(sizes):
        while end < len(sizes) and (end < place + 2 or held + sizes[end] <= room):
            held += sizes[end]
            end += 1
        places.append(end)
        held -= size
    return tuple(places)


def most_at_once(sizes: Sequence[int], room: int) -> int:
    """The most bytes of units that are gathered together in that order."""
    spans = enumerate(reach(sizes, room))
    return max((sum(sizes[first:end]) for first, end in spans), default=0)
