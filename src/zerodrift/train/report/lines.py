"""The lines of a run's metrics in memory: steps as columns of numbers, all others as they are.

A run may have a million steps, and whoever leads it keeps what its page shows of each: 88 bytes a step, a
tenth of what its line takes.

Invariant: what is no finite number in a line is none here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step."""

    step: int
    """Counted from 1, skipped ones too."""
    loss: float
    """Mean over the step's labels, before the update."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Of the first parameter group."""
    loss_scale: float
    tokens: int
    """Seen so far, with padding."""
    epoch: float
    seconds: float
    """So far, in training steps."""
    tokens_per_second: float
    memory: int
    """Bytes: of the process on a CPU, at peak on a GPU."""
    skipped: bool = False


class RunLines:
    """Iterates over the lines that are not steps."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns = {field.name: array("d") for field in fields(StepMetrics)}
        self._others: list[Mapping[str, Any]] = []
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        if line["kind"] != "step":
            self._others.append(line)
            return
        for name, column in self._columns.items():
            value = line.get(name)
            column.append(math.nan if value is None else float(value))

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._others)

    def __reversed__(self) -> Iterator[Mapping[str, Any]]:
        return reversed(self._others)

    def steps(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of every step that has a value."""
        pairs = zip(self._columns["step"], self._columns[key], strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def last(self, key: str) -> float | None:
        """Of the last step that has one."""
        return next((value for value in reversed(self._columns[key]) if math.isfinite(value)), None)
