"""The timeline of a pipeline step: the start of each action, and the time that ranks wait for each other.

`pipeline/schedules.py` gives the order of actions. A forward, an input's gradient and a weight's gradient
take one unit of time each, and messages take none.

Invariant: pure. An action begins as soon as its rank is free and the actions that it needs have ended.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

TIME = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank on a piece and a micro-batch."""

    kind: str
    """`F` forward, `B` whole backward, `I` gradient of the input, `W` gradients of the weights."""
    piece: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.piece}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Timeline:
    ranks: tuple[tuple[Action, ...], ...]
    paired: frozenset[Action] = frozenset()
    """Forwards that are interleaved with the backward behind them."""

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """Start of each action, in units of time."""
        ended: dict[Action, int] = {}
        free = [0] * len(self.ranks)
        starts: list[list[int]] = [[] for _ in self.ranks]
        last = max((action.piece for rank in self.ranks for action in rank), default=0)
        while any(len(done) < len(rank) for done, rank in zip(starts, self.ranks, strict=True)):
            moved = False
            for number, rank in enumerate(self.ranks):
                while len(starts[number]) < len(rank):
                    action = rank[len(starts[number])]
                    needs = dependencies(action, last)
                    ends = [ended[way] for ways in needs for way in ways if way in ended]
                    if len(ends) < len(needs):
                        break
                    begin = max([free[number], *ends])
                    starts[number].append(begin)
                    free[number] = ended[action] = begin + TIME[action.kind]
                    moved = True
            if not moved:
                raise AssertionError("a schedule in which every rank waits for another")
        return tuple(map(tuple, starts))

    @property
    def length(self) -> int:
        """Units of time from the first action to the end of the last."""
        ends = [
            start + TIME[action.kind]
            for begun, rank in zip(self.starts, self.ranks, strict=True)
            for start, action in zip(begun, rank, strict=True)
        ]
        return max(ends, default=0)

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks' time."""
        busy = sum(TIME[action.kind] for rank in self.ranks for action in rank)
        total = self.length * len(self.ranks)
        return 1 - busy / total if total else 0.0

    @property
    def most_alive(self) -> tuple[int, ...]:
        """The most micro-batches per rank that hold activations for a later backward."""
        change = {"F": 1, "B": -1, "I": -1}
        return tuple(
            max(itertools.accumulate((change.get(action.kind, 0) for action in rank), initial=0))
            for rank in self.ranks
        )


def dependencies(action: Action, last: int) -> list[tuple[Action, ...]]:
    """List the dependencies of an action, each as the alternative actions that satisfy it."""
    piece, micro = action.piece, action.micro_batch
    if action.kind == "F":
        return [(Action("F", piece - 1, micro),)] if piece else []
    if action.kind == "W":
        return [(Action("I", piece, micro),)]
    own: list[tuple[Action, ...]] = [(Action("F", piece, micro),)]
    return own if piece == last else [*own, (Action("B", piece + 1, micro), Action("I", piece + 1, micro))]
