"""Reduce: collect each unit's gradients from `param.grad` and sum them, in one order on all ranks.

The plan says how (`accumulate`, `reduce`). A unit is ready when its backward is over. Ready units are reduced
strictly in the plan's order, the rest at the end of the backward. So all ranks issue the same collectives in
the same order whatever their data did, at every stage. A gradient that arrives after its unit was reduced is
reduced at the end of the backward, or in the step. If weight gradients are deferred, all reductions that run
once per step run in `flush`, because ranks differ in which gradients are late.

Invariant: after a backward, each of its gradients is either in a landing buffer that waits for the step's
last micro-batch, or in `reduced`. `param.grad` is empty, or shows that the engine has the gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from zerodrift.comm import Handle
from zerodrift.engine.nested import at_the_end, current_backward
from zerodrift.engine.progress import TrainingProgress, refusal
from zerodrift.engine.step.gather import LiveUnit
from zerodrift.engine.trained_segment import TrainedSegment
from zerodrift.engine.traversal import Traversal
from zerodrift.errors import ModelError, Problems, RankError
from zerodrift.plan import REDUCTIONS, reduce_order


class Gradients:
    """The gradients of all units through one optimizer step."""

    def __init__(
        self, units: Sequence[LiveUnit], traversal: Traversal, before: float, *, requires_tree: bool = False
    ) -> None:
        """`before` divides gradients before the reduction. A gradient without a place in the tree over
        micro-batches is an error if `requires_tree`; otherwise its segment leaves the tree for this step."""
        self._traversal = traversal
        self._units = units
        by_name = {unit.spec.name: unit for unit in units}
        order = [by_name[spec.name] for spec in reduce_order([unit.spec for unit in units])]
        self._trained = [unit for unit in order if unit.trained]
        """Trained units in the plan's order of reductions."""
        self._segments = [segment for unit in self._trained for segment in unit.trained]
        self._tree = any(segment.tree for segment in self._segments)
        self._requires_tree = requires_tree
        self.before = before
        traversal.gradients = self
        self._running = False
        self._task = -1
        """The autograd backward in which `counts` was decided."""
        self.counts = False
        """Whether the running backward adds to gradients of parameters, and so is a micro-batch."""
        self._is_called_by_engine = False
        """Whether the engine calls the next backward, which counts whatever it reaches."""
        self._reached: frozenset[int] = frozenset()
        self._uses: list[int] = []
        """`uses` of each unit when the backward began."""
        self._last = True
        self._ready: set[int] = set()
        self._next = 0
        """Units of `_trained` that were reduced in this backward."""
        self._collected: set[int] = set()
        """Segments that were collected in this backward."""
        self._sending: list[tuple[TrainedSegment, Handle]] = []
        self.progress: TrainingProgress | None = None
        self.late: Any = None
        """The `WeightQueue` of `pipeline/deferred.py`, if weight gradients are deferred."""
        self.is_scheduled = False
        """Pipelines only: whether a schedule runs backwards in its own order, without hooks."""
        self._creates_graph = False
        """Whether a backward of this step ran with `create_graph`, which replaces `param.grad`."""
        self._addresses: dict[torch.Tensor, int] = {}
        """Parameter -> address of its gradient after the last late arrival."""
        self._replaced: set[torch.Tensor] = set()
        self._shows = False
        """Whether `param.grad` shows that the engine has the gradients."""
        self.exposure_scale: Callable[[bool], float] | None = None
        """Set if user code may read and change whole gradients between a backward and the step. Returns their
        factor, given whether they are the sum of all ranks."""

    def arrive_late(self, parameter: torch.Tensor) -> None:
        """Record where a late gradient was added, to notice if user code replaces it."""
        if parameter.grad is not None:
            address = parameter.grad.data_ptr()
            if self._addresses.setdefault(parameter, address) != address:
                self._replaced.add(parameter)

    def open(self) -> None:
        """Let additions to `param.grad` between backwards go to landing buffers, where there are any."""
        for segment in self._segments:
            segment.open_gradients()

    # --- one backward -----------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Begin a forward outside of any backward."""
        if self._shows and torch.is_grad_enabled():
            self.hide()
        if self._running and self.progress is not None:
            # autograd drops its callbacks when a backward raises, so the next forward finds out.
            self.progress.failed()

    @contextlib.contextmanager
    def micro_batch(self, loss: torch.Tensor) -> Iterator[None]:
        """Return the context of a backward of this loss, which is a micro-batch whatever it reaches."""
        handle = loss.register_hook(lambda grad: self.begin()) if loss.requires_grad else None
        self._is_called_by_engine = True
        try:
            yield
        finally:
            self._is_called_by_engine = False
            if handle is not None:
                handle.remove()

    def begin(self) -> None:
        """Begin a backward when a gradient arrives at a unit. The first call registers the end."""
        if not self._running:
            self._start()
            at_the_end(self._end)
        self._creates_graph = self._creates_graph or torch.is_grad_enabled()
        if not self.counts and current_backward() != self._task:
            # A reentrant checkpoint runs a backward inside this one, with gradients of its own.
            self._task = current_backward()
            reached = frozenset(unit.number for unit in self._trained if unit.is_reached())
            self.counts = self._is_called_by_engine or bool(reached)
            if self.counts:
                self._reached = self._traversal.reached = reached

    def _start(self) -> None:
        self.hide()
        self._running, self.counts, self._task, self._reached = True, False, -1, frozenset()
        self._traversal.turn()
        self._last = self.progress is None or self.progress.is_last()
        self._ready.clear()
        self._collected.clear()
        self._next = 0
        self._uses = [unit.uses for unit in self._units]

    def over(self, unit: LiveUnit) -> None:
        """Reduce the unit's gradients in their turn."""
        if not self.counts:
            return
        if self._tree and self._traversal.repeats:
            return  # several backwards of a unit are one part of the tree: reduce it at the end
        self._ready.add(unit.number)
        while self._next < len(self._trained) and self._trained[self._next].number in self._ready:
            for segment in self._trained[self._next].trained:
                self._reduce_segment(segment)
            self._next += 1

    def _end(self) -> None:
        try:
            if self.counts:
                self._traversal.end()
                for unit in self._trained[self._next :]:
                    for segment in unit.trained:
                        self._reduce_segment(segment)
                self._finish(0)
                for segment in self._segments:
                    if segment.first_uncollected_gradient:
                        self._reduce_segment(segment)
                self._finish(0)
            for unit, uses in zip(self._units, self._uses, strict=True):
                if not self.counts:
                    unit.uses = uses
                elif self._last or (unit.trained and unit.number not in self._reached):
                    unit.uses = 0  # no later backward will come to this unit
                unit.rest()
        finally:
            self._running = False
        if not self.counts:
            return
        if self.late is not None:
            self.late.end_micro_batch()
        if not self._is_late:
            self._show()
        if self.progress is not None:
            self.progress.ended()

    @property
    def _is_late(self) -> bool:
        return self.late is not None or self.is_scheduled

    def _show(self) -> None:
        self._shows = True
        for segment in self._segments:
            segment.exposure.show()
            if self.exposure_scale is not None and not self._requires_tree:
                segment.expose_gradients(self._last, self.exposure_scale)

    def show_again(self) -> None:
        """Expose gradients again that were hidden in the middle of a step."""
        if self.exposure_scale is not None and not self._shows and not self._is_late:
            self._show()

    def hide(self) -> str:
        """Empty `param.grad` for new gradients. Return a parameter whose gradient user code has cleared, or
        ""."""
        if not self._shows:
            return ""
        self._shows = False
        cleared = [segment.exposure.hide() for segment in self._segments]
        return next(filter(None, cleared), "")

    @property
    def first_uncollected(self) -> str:
        """The first parameter with a gradient that was not collected, or ""."""
        found = (segment.first_uncollected_gradient for segment in self._segments)
        return next(filter(None, found), "")

    def end_untracked_backward(self) -> None:
        """End a backward that no hook has noticed, because the model's output has no visible tensor."""
        if self._running or not self.first_uncollected:
            return
        self._start()
        self.counts = True
        self._end()

    def _reduce_segment(self, segment: TrainedSegment) -> None:
        if segment.tree:  # a part of the tree that was summed takes no more gradients
            if segment.number in self._collected:
                self._leave_tree(segment, "gradient too late", segment.first_uncollected_gradient)
            elif segment.reduced is not None:
                self._leave_tree(segment, "backward too late", segment.rows[0].name)
            self._collected.add(segment.number)
        send = segment.update.reduce.when == "every" or (self._last and self.late is None)
        send = send and not (segment.tree and segment.ranks == 1)
        if send:
            self._finish(REDUCTIONS - 1)  # before another buffer is taken to land in
            segment.comm.make_room(segment.update.reduce.wire.nbytes(segment.spec.padded), segment.axis)
        self._land(segment)
        if send:
            self._send(segment)
        elif segment.tree:
            segment.add_to_sum()

    def _leave_tree(self, segment: TrainedSegment, kind: str, name: str) -> None:
        if self._requires_tree:
            raise refusal(kind, name=name)
        segment.leave_tree()

    def _land(self, segment: TrainedSegment) -> None:
        if self._is_late:
            self._require_added(segment)
        segment.collect_gradients()

    def _require_added(self, segment: TrainedSegment) -> None:
        """Refuse `param.grad = new` instead of `param.grad += new` if gradients arrive in several turns."""
        problems = Problems()
        preset = {} if self._creates_graph else segment.preset_addresses()
        for number, (row, parameter) in enumerate(zip(segment.rows, segment.parameters, strict=True)):
            address = self._addresses.pop(parameter, preset.get(number))
            moved = address is not None and (parameter.grad is None or parameter.grad.data_ptr() != address)
            if parameter in self._replaced or (moved and not self._creates_graph):
                problems.add(
                    row.name,
                    "a gradient that has arrived must be added to, `param.grad += new`",
                    got="`param.grad` set to something else",
                    do="The old gradient would be lost.",
                )
        problems.raise_as(ModelError)

    def _send(self, segment: TrainedSegment) -> None:
        self._finish(REDUCTIONS - 1)
        self._sending.append((segment, segment.start_reduce(self.before)))

    def _finish(self, leave: int) -> None:
        while len(self._sending) > leave:
            segment, handle = self._sending.pop(0)
            handle.wait()
            segment.finish_reduce()

    # --- the step ---------------------------------------------------------------------------------------

    @property
    def set_by_hand(self) -> list[TrainedSegment]:
        """Segments with gradients that user code has set since the last backward, on this rank at least."""
        if self.late is not None:
            return []
        return [
            segment
            for segment in self._segments
            if (segment.ranks > 1 or self._requires_tree)
            and segment.first_uncollected_gradient
            and (self._requires_tree or not segment.has_unreduced_gradients)
        ]

    def flush(self, without: Sequence[TrainedSegment] = ()) -> None:
        """Reduce, in order, all gradients that wait for a last micro-batch or arrived late."""
        if self.exposure_scale is not None:
            self.hide()
        self._finish(0)
        if self.late is not None:
            self.open()
            self.late.drain()
        for segment in self._segments:
            if segment in without:
                continue
            loose = segment.first_uncollected_gradient
            if segment.tree and loose:
                self._leave_tree(segment, "gradient by hand", loose)
            if segment.tree and segment.has_unreduced_gradients:
                self._send(segment)
            elif loose or segment.has_unreduced_gradients or self.late is not None:  # then all segments
                self._land(segment)
                self._send(segment)
        self._finish(0)
        for segment in self._segments:
            segment.end_sum()

    def reduce(self, segments: Iterable[TrainedSegment]) -> None:
        """Collect and reduce the gradients of segments now."""
        for segment in segments:
            segment.leave_tree()
            self._land(segment)
            self._send(segment)
        self._finish(0)

    def sum_over_replicas(self) -> None:
        for segment in self._segments:
            if segment.reduced is not None:
                segment.add_replicas(segment.reduced, self.before)

    def abort(self) -> None:
        """End running reductions after an exception. Gradients that were reduced before stay."""
        try:
            self._finish(0)
        except RankError:
            self._sending.clear()  # the error was raised where the reduction was waited for
        self._running = False
        self._ready.clear()

    def drop(self) -> None:
        self.abort()
        self._shows = False
        if self.late is not None:
            self.late.clear()
        self._creates_graph = False
        self._addresses.clear()
        self._replaced.clear()
        for unit in self._units:
            unit.uses = 0
            for segment in unit.segments:
                segment.drop_gradients()

    # --- pipelines: backwards in any order, and in several turns ------------------------------------------

    def land_in_place(self, segments: Iterable[TrainedSegment]) -> None:
        """Give segments landing buffers, so that every later gradient is added there."""
        for segment in segments:
            segment.collect_gradients()
            segment.open_gradients()

    def open_parts(self, segments: Iterable[TrainedSegment], number: int) -> None:
        """Add gradients to part `number` of the tree, until `close_parts`."""
        for segment in segments:
            segment.open_part(number)

    def close_parts(self, segments: Iterable[TrainedSegment], number: int) -> None:
        for segment in segments:
            self._require_added(segment)
            segment.close_part(number)

    def take_parts(self, segments: Iterable[TrainedSegment]) -> None:
        """Add the next part of segments, which must be complete, to the tree."""
        for segment in segments:
            segment.take_part()
            if segment.update.reduce.when == "every" and segment.ranks > 1:
                self._send(segment)
            else:
                segment.add_to_sum()
        self._finish(0)
