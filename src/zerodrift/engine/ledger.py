"""What arrived: per parameter and micro-batch, how often a gradient came at once and how often late.

Off unless a step has gradients that come late; a hook per parameter is what it costs. `grads.py` tells it
where a micro-batch ends and when gradients are collected, a queue of late ones when it formed one.

Invariant: a gradient that was counted is in what is collected. One that was put there and then replaced,
`param.grad = new` for `param.grad += new`, is an error that names the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerodrift.engine.segment import FlatSegment
from zerodrift.errors import ModelError, Problems


@dataclass(frozen=True, slots=True)
class GradientCounts:
    """The gradients of one parameter in one micro-batch."""

    eager: int = 0
    """That autograd added in a backward; a parameter that is used several times is added to once."""
    late: int = 0
    """That were formed from a queue, or written to `param.grad` between backwards."""

    @property
    def count(self) -> int:
        return self.eager + self.late


class Ledger:
    """The arrivals of one step."""

    def __init__(self, segments: Iterable[FlatSegment]) -> None:
        self._names: dict[torch.Tensor, str] = {}
        self._handles: list[Any] = []
        for segment in segments:
            for row, parameter in zip(segment.rows, segment.parameters, strict=True):
                self._names[parameter] = row.name
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._eager))
        self._counts: list[dict[str, GradientCounts]] = [{}]
        self._now = 0
        """The micro-batch whose backward is under way."""
        self._left: dict[torch.Tensor, int] = {}
        """Parameter -> where the gradient was after the last arrival."""
        self._replaced: set[torch.Tensor] = set()

    def _eager(self, parameter: torch.Tensor) -> None:
        self._count(parameter, eager=1)

    def late(self, parameter: torch.Tensor, micro_batch: int) -> None:
        """A queue has added a gradient that belongs to a micro-batch of this step, counted from 0."""
        self._count(parameter, late=1, micro_batch=micro_batch)

    @property
    def now(self) -> int:
        """The micro-batch whose backward is under way."""
        return self._now

    def turn_to(self, micro_batch: int) -> None:
        """Gradients that come at once belong to this micro-batch from now on."""
        self._now = micro_batch

    def _count(
        self, parameter: torch.Tensor, eager: int = 0, late: int = 0, micro_batch: int | None = None
    ) -> None:
        name = self._names.get(parameter)
        if name is None or parameter.grad is None:
            return
        number = self._now if micro_batch is None else micro_batch
        while len(self._counts) <= number:
            self._counts.append({})
        counts = self._counts[number]
        before = counts.get(name, GradientCounts())
        counts[name] = replace(before, eager=before.eager + eager, late=before.late + late)
        self._look(parameter)
        self._left[parameter] = parameter.grad.data_ptr()

    def _look(self, parameter: torch.Tensor) -> None:
        """Whether the gradient is still where the last arrival left it."""
        left = self._left.get(parameter)
        here = None if parameter.grad is None else parameter.grad.data_ptr()
        # Under `create_graph` autograd itself puts old + new in the old one's place.
        if left is not None and here != left and not torch.is_grad_enabled():
            self._replaced.add(parameter)

    def next_micro_batch(self) -> None:
        self.turn_to(self._now + 1)

    def check(self, segment: FlatSegment) -> None:
        """Before a segment's gradients are collected: what was counted must be there."""
        problems = Problems()
        for row, parameter in zip(segment.rows, segment.parameters, strict=True):
            self._look(parameter)
            self._left.pop(parameter, None)
            if parameter in self._replaced:
                problems.add(
                    row.name,
                    "a gradient that has arrived must be added to, `param.grad += new`",
                    got="`param.grad` set to something else",
                    do="What was there before would be lost.",
                )
        problems.raise_as(ModelError)

    def arrivals(self) -> list[dict[str, GradientCounts]]:
        """Per micro-batch of this step that has ended, name -> what arrived; a parameter that got nothing is
        not there."""
        missing = max(0, self._now - len(self._counts))
        return [dict(counts) for counts in (*self._counts[: self._now], *({},) * missing)]

    def clear(self) -> None:
        """A new step."""
        self._counts = [{}]
        self._now = 0
        self._left.clear()
        self._replaced.clear()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
