"""From `param.grad` to a reduced slice: when each unit's gradient is collected, sent and summed.

The plan says how (`accumulate`, `reduce`); this room says when: a unit is ready once its backward is
over, and ready units are reduced strictly in the plan's order, the rest at the end of the backward. So all
ranks issue the same collectives in the same order whatever their data did (an expert that got no token, a
unit that was not used), and stage 0 goes the way of stage 3.

A gradient that arrives when its unit was reduced already (a shared block under reentrant checkpointing) is
reduced at the end of the backward, or in the step. Where weight gradients are deferred, which of them are
late differs between ranks, so everything that is reduced once per step is reduced in the step.

Invariant: when a backward has ended, every gradient of that backward is either in a landing buffer that
waits for the step's last micro-batch, or in `reduced`; `param.grad` says no more than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zerodrift.comm.collectives import Handle
from zerodrift.engine import steps
from zerodrift.engine.forward_inputs import at_the_end
from zerodrift.engine.ledger import Ledger
from zerodrift.engine.trained import TrainedSegment
from zerodrift.engine.traversal import Traversal, TraversedUnit
from zerodrift.engine.unit import LiveUnit, current_backward
from zerodrift.errors import RankError
from zerodrift.plan.cost import REDUCTIONS
from zerodrift.plan.schedule import reduce_order

IN_FLIGHT = REDUCTIONS
"""Reductions under way at once: the landing buffers of so many segments are alive beside the one that is
being filled."""


@dataclass(slots=True)
class _Sending:
    segment: TrainedSegment
    handle: Handle


class LateGradients(Protocol):
    """Weight gradients that are formed after their backward: what `pipeline` puts here."""

    def drain(self) -> object:
        """Form all of them: add them to `param.grad`."""

    def end_micro_batch(self) -> object:
        """A backward has ended: what was deferred since the last one belongs to it."""

    def clear(self) -> object:
        """Forget them, and begin to count micro-batches anew."""


@dataclass(frozen=True, slots=True)
class BackwardCallbacks:
    """Who counts micro-batches: the engine."""

    is_last: Callable[[], bool]
    """Whether the backward that begins now is the last micro-batch of its step."""
    ended: Callable[[], None]
    """Every gradient of a backward is where it belongs. Not called after one that adds to no gradient."""
    failed: Callable[[], None]
    """A backward that the engine did not call has raised; its gradients are incomplete."""


class Gradients:
    """The gradients of all units through one optimizer step."""

    def __init__(self, units: Sequence[LiveUnit], traversal: Traversal, before: float) -> None:
        self._traversal = traversal
        self._units = units
        by_name = {unit.spec.name: unit for unit in units}
        order = [by_name[spec.name] for spec in reduce_order([unit.spec for unit in units])]
        self._trained = [unit for unit in order if unit.trained]
        """In the order in which the plan reduces them."""
        self._tree = any(segment.tree for segment in self._segments())
        self.before = before
        self._running = False
        self._task = -1
        """The backward of autograd in which `counts` was found out."""
        self.counts = False
        """Whether the backward under way adds to gradients of parameters, and so is a micro-batch."""
        self._told = False
        """Whether the engine itself calls the backward that comes, which counts whatever it reaches."""
        self._reached: frozenset[int] = frozenset()
        """The units whose gradients it adds to."""
        self._uses: list[int] = []
        """Of each unit, when the backward began."""
        self._last = True
        self._ready: set[int] = set()
        self._next = 0
        """How many of `_trained` have been reduced in this backward."""
        self._collected: set[int] = set()
        """Segments whose part of the tree over micro-batches has come in this backward."""
        self._sending: list[_Sending] = []
        self.callbacks: BackwardCallbacks | None = None
        self.ledger: Ledger | None = None
        self._late: LateGradients | None = None
        self._shows = False
        """Whether `param.grad` says that the engine has it."""
        self.seen: Callable[[bool], float] | None = None
        """Where gradients rest whole they may be seen between a backward and the step, and changed: what each
        is multiplied by, given whether it is the sum of all ranks. None where they may not."""

    def expect(self, late: LateGradients | None) -> None:
        """From now on weight gradients may come late, from `late`, and what arrives is counted; None ends
        that."""
        if self.ledger is not None:
            self.ledger.detach()
        self._late = late
        self.ledger = None if late is None else Ledger(self._segments())

    def count(self) -> None:
        """From now on what arrives is counted."""
        if self.ledger is None:
            self.ledger = Ledger(self._segments())

    def open(self) -> None:
        """Let what is added to `param.grad` between backwards land in place, where there is a place."""
        for segment in self._segments():
            segment.open_gradients()

    # --- one backward (the protocol that units ask of) ------------------------------------------------

    def forward_begins(self) -> None:
        if self._shows and torch.is_grad_enabled():
            self.hide()
        if self._running and self.callbacks is not None:
            # autograd drops its callbacks when a backward raises, so only the next forward tells.
            self.callbacks.failed()

    @contextlib.contextmanager
    def micro_batch(self, loss: torch.Tensor) -> Iterator[None]:
        """A backward of this loss inside is a micro-batch, whatever it reaches: it begins at the loss."""
        handle = loss.register_hook(lambda grad: self.begin()) if loss.requires_grad else None
        self._told = True
        try:
            yield
        finally:
            self._told = False
            if handle is not None:
                handle.remove()

    def begin(self) -> None:
        if not self._running:
            self._start()
            at_the_end(self._end)
        if not self.counts and current_backward() != self._task:
            self._look()

    def _start(self) -> None:
        self.hide()
        self._running, self.counts, self._task, self._reached = True, False, -1, frozenset()
        self._traversal.turn()
        self._last = self.callbacks is None or self.callbacks.is_last()
        self._ready.clear()
        self._collected.clear()
        self._next = 0
        self._uses = [unit.uses for unit in self._units]

    def _look(self) -> None:
        """Ask autograd which units this backward reaches. A reentrant checkpoint has a backward of its own
        inside, which the one around it does not know of."""
        self._task = current_backward()
        reached = frozenset(unit.number for unit in self._trained if unit.is_reached())
        self.counts = self._told or bool(reached)
        if self.counts:
            self._reached = reached
            self._traversal.reaches(reached)

    def over(self, unit: TraversedUnit) -> None:
        if not self.counts:
            return
        if self._tree and self._traversal.repeats:
            return  # a unit may have several backwards, which are one part of the tree: all wait for the end
        self._ready.add(unit.number)
        while self._next < len(self._trained) and self._trained[self._next].number in self._ready:
            self._reduce(self._trained[self._next])
            self._next += 1

    def _end(self) -> None:
        try:
            if self.counts:
                self._reduce_rest()
            for unit, uses in zip(self._units, self._uses, strict=True):
                if not self.counts:
                    unit.uses = uses
                elif self._last or (unit.trained and unit.number not in self._reached):
                    unit.uses = 0  # no backward is to come to what this one had no use for
                unit.rest()
        finally:
            self._running = False
        if not self.counts:
            return
        if self._late is not None:
            self._late.end_micro_batch()
        if self.ledger is not None:
            self.ledger.next_micro_batch()
        if self._late is None and self.ledger is None:
            self._show()
        if self.callbacks is not None:
            self.callbacks.ended()

    def _show(self) -> None:
        self._shows = True
        for segment in self._segments():
            segment.show_collected()
            if self.seen is not None and segment.can_be_seen:
                segment.let_see(self._last, self.seen)

    def show_again(self) -> None:
        """Where gradients may be seen, after something that took them out of sight before the step's end."""
        if self.seen is not None and not self._shows and self._late is None and self.ledger is None:
            self._show()

    def hide(self) -> str:
        """From now on gradients may come to `param.grad`. Returns a parameter whose gradient was taken away
        there since the last backward, which did nothing to what the engine has; "" where there is none."""
        if not self._shows:
            return ""
        self._shows = False
        return next(filter(None, [segment.hide_collected() for segment in self._segments()]), "")

    def _reduce_rest(self) -> None:
        self._traversal.end(self)
        for unit in self._trained[self._next :]:
            self._reduce(unit)
        self._finish(0)
        for segment in self._segments():
            if segment.loose:
                self._collect(segment)
        self._finish(0)

    @property
    def loose(self) -> str:
        """A parameter with a gradient that was not collected; "" where there is none."""
        return next((segment.loose for segment in self._segments() if segment.loose), "")

    def end_unseen(self) -> bool:
        """End a backward that no hook has told of: the model's output holds no tensor that could be found.
        Returns whether there was one."""
        if self._running or not self.loose:
            return False
        self._start()
        self.counts = True
        self._end()
        return True

    def _segments(self) -> list[TrainedSegment]:
        """The trained ones, in the order in which they are reduced."""
        return [segment for unit in self._trained for segment in unit.trained]

    def _reduce(self, unit: LiveUnit) -> None:
        for segment in unit.trained:
            self._collect(segment)

    def _collect(self, segment: TrainedSegment) -> None:
        if segment.tree:
            self._require_first(segment)
        send = segment.update.reduce.when == "every" or (self._last and self._late is None)
        send = send and not (segment.tree and segment.ranks == 1)
        if send:
            self._finish(IN_FLIGHT - 1)  # before another buffer is taken to land in
        self._land(segment)
        if send:
            self._send(segment)
        elif segment.tree:
            segment.wait_for_others()

    def _require_first(self, segment: TrainedSegment) -> None:
        """What has gone on its way through the tree cannot be added to."""
        if segment.number in self._collected:
            raise steps.too_late(segment.loose)
        if segment.reduced is not None:
            raise steps.too_many(segment.rows[0].name)
        self._collected.add(segment.number)

    def _land(self, segment: TrainedSegment) -> None:
        if self.ledger is not None:
            self.ledger.check(segment)
        segment.collect_gradients()

    def _send(self, segment: TrainedSegment) -> None:
        self._finish(IN_FLIGHT - 1)
        self._sending.append(_Sending(segment, segment.start_reduce(self.before)))

    def _finish(self, leave: int) -> None:
        while len(self._sending) > leave:
            sending = self._sending.pop(0)
            sending.handle.wait()
            sending.segment.finish_reduce()

    # --- the step -------------------------------------------------------------------------------------

    @property
    def unreduced(self) -> list[TrainedSegment]:
        """Segments with gradients that were put there since the last backward, and that others of the axis
        may have none for."""
        if self._late is not None:
            return []
        sharded = (segment for segment in self._segments() if segment.ranks > 1 or segment.tree)
        return [segment for segment in sharded if segment.loose and (segment.tree or not segment.waits)]

    def flush(self, without: Sequence[TrainedSegment] = ()) -> None:
        """Reduce, in order, what waits for a last micro-batch that did not come, or came late."""
        if self.seen is not None:
            self.hide()
        self._finish(0)
        if self._late is not None:
            self.open()
            self._late.drain()
        for segment in self._segments():
            # Which gradients are late is no decision of the plan's: all segments go, on all ranks alike.
            if segment in without:
                continue
            if segment.tree and segment.loose:
                raise steps.beside(segment.loose)
            if segment.tree and segment.waits:
                self._send(segment)
            elif segment.loose or segment.waits or self._late is not None:
                self._land(segment)
                self._send(segment)
        self._finish(0)
        for segment in self._segments():
            segment.end_sum()

    def land_in_place(self, segments: Iterable[TrainedSegment]) -> None:
        """Give segments that have landed nothing their buffers, zero, and let every gradient be added there:
        for backwards that end in no order, or in several parts."""
        for segment in segments:
            segment.collect_gradients()
            segment.open_gradients()

    def reduce(self, segments: Iterable[TrainedSegment]) -> None:
        """Reduce what has landed of segments, now."""
        for segment in segments:
            self._land(segment)
            self._send(segment)
        self._finish(0)

    def open_parts(self, segments: Iterable[TrainedSegment], number: int) -> None:
        """Until `close_parts`, what comes belongs to part `number` of the tree."""
        for segment in segments:
            segment.open_part(number)

    def close_parts(self, segments: Iterable[TrainedSegment], number: int) -> None:
        for segment in segments:
            if self.ledger is not None:
                self.ledger.check(segment)
            segment.close_part(number)

    def take_parts(self, segments: Iterable[TrainedSegment]) -> None:
        """The next part of segments is complete: it goes where it is added to the others."""
        for segment in segments:
            segment.take_part()
            if segment.update.reduce.when == "every" and segment.ranks > 1:
                self._send(segment)
            else:
                segment.wait_for_others()
        self._finish(0)

    def sum_over_replicas(self) -> None:
        for segment in self._segments():
            if segment.reduced is not None:
                segment.sum_over_replicas(self.before)

    def abort(self) -> None:
        """A backward or forward failed: nothing stays under way, what had been reduced before stays."""
        try:
            self._finish(0)
        except RankError:
            self._sending.clear()  # with nobody to end it with, and said where it was first waited for
        self._running = False
        self._ready.clear()

    def drop(self) -> None:
        """Forget all gradients."""
        self.abort()
        self._shows = False
        if self._late is not None:
            self._late.clear()
        if self.ledger is not None:
            self.ledger.clear()
        for unit in self._units:
            unit.uses = 0
            for segment in unit.segments:
                segment.drop_gradients()
