"""From `param.grad` to a reduced slice: when each unit's gradient is collected, sent and summed.

The plan says how (`accumulate`, `reduce`); this room says when: a unit is ready once its backward is
over, and ready units are reduced strictly in the plan's order, the rest at the end of the backward. So all
ranks issue the same collectives in the same order whatever their data did (an expert that got no token, a
unit that was not used), and stage 0 goes the way of stage 3.

Invariant: when a backward has ended, every gradient of that backward is either in a landing buffer that
waits for the step's last micro-batch, or in `reduced`; no `param.grad` is left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerodrift.comm.collectives import Handle
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.unit import LiveUnit

IN_FLIGHT = 2
"""Reductions under way at once: the landing buffers of so many segments are alive beside the one that is
being filled."""


@dataclass(slots=True)
class _Sending:
    segment: FlatSegment
    handle: Handle


class Gradients:
    """The gradients of all units through one optimizer step."""

    def __init__(self, units: list[LiveUnit], before: float) -> None:
        self._units = [*reversed([u for u in units if not u.is_root]), *[u for u in units if u.is_root]]
        """In the order in which the plan reduces them."""
        self._before = before
        self._running = False
        self._ready: set[int] = set()
        self._next = 0
        """How many of `_units` have been reduced in this backward."""
        self._sending: list[_Sending] = []
        self.last = True
        """Whether this backward is the step's last micro-batch: set by the engine before it begins."""
        self.when_done: Callable[[], None] = lambda: None
        """Called at the end of every backward."""

    # --- one backward (the protocol that units ask of) ------------------------------------------------

    @property
    def running(self) -> bool:
        return self._running

    def begin(self) -> None:
        if not self._running:
            self._running = True
            self._ready.clear()
            self._next = 0
            # The one callback at the end of a backward that autograd offers; FSDP2 and DDP use it too.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def over(self, unit: LiveUnit) -> None:
        self._ready.add(unit.number)
        while self._next < len(self._units) and self._units[self._next].number in self._ready:
            self._reduce(self._units[self._next])
            self._next += 1

    def _end(self) -> None:
        try:
            for unit in self._units[self._next :]:
                self._reduce(unit)
            self._finish(0)
            for unit in self._units:
                unit.uses = 0 if self.last else unit.uses
        finally:
            self._running = False
        self.when_done()

    def _reduce(self, unit: LiveUnit) -> None:
        for segment in unit.segments:
            if not segment.collect_gradients() or segment.update is None:
                continue
            if self.last or segment.update.reduce.when == "every":
                self._send(segment)

    def _send(self, segment: FlatSegment) -> None:
        self._finish(IN_FLIGHT - 1)
        self._sending.append(_Sending(segment, segment.start_reduce(self._before)))

    def _finish(self, leave: int) -> None:
        while len(self._sending) > leave:
            sending = self._sending.pop(0)
            sending.handle.wait()
            sending.segment.finish_reduce()

    # --- the step -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Reduce what still waits, in order: a step that comes before the planned last micro-batch."""
        for unit in self._units:
            for segment in unit.segments:
                if segment.waits and segment.collect_gradients() and segment.landing is not segment.reduced:
                    self._send(segment)
        self._finish(0)

    def sum_over_replicas(self) -> None:
        for unit in self._units:
            for segment in unit.segments:
                if segment.reduced is not None:
                    segment.sum_over_replicas(self._before)

    def abort(self) -> None:
        """A backward or forward failed: nothing stays under way, what had been reduced before stays."""
        self._finish(0)
        self._running = False
        self._ready.clear()

    def drop(self) -> None:
        """Forget all gradients."""
        self.abort()
        for unit in self._units:
            unit.uses = 0
            for segment in unit.segments:
                segment.drop_gradients()
