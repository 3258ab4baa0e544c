"""Gather the units of a rank's pieces while a schedule runs them, land their gradients, and reduce them.

A schedule mixes the forwards and backwards of several micro-batches and splits backwards in two, so a hook on
a module cannot know whose micro-batch it sees. The code that runs the schedule calls `begin`, then `gather`
and `release` around each forward and backward, `ended` when a piece has the last weight gradient of a
micro-batch, and `end`. From `begin` on, every `param.grad` is a view of a buffer in the accumulate dtype.
Under `reduce.order: tree` that holds inside `backward` only, with a buffer per micro-batch; the parts of a
unit are added to the tree in the order of their micro-batches.

Invariant: during a backward no `param.grad` of a trained parameter is None, and each added value is reduced
exactly once: after every micro-batch or after the last, as the plan says.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from zerodrift.comm import Collectives, Sum
from zerodrift.engine import BEFORE_ALL, Gradients, LiveUnit, TrainedSegment, saved_views
from zerodrift.plan import Plan, is_tied_across_ranks, reduce_order, units_of_piece


class StageUnits:
    """The units of an engine whose micro-batches come in the order of a schedule."""

    def __init__(self, part: Plan, units: list[LiveUnit], gradients: Gradients) -> None:
        self._part = part
        self._gradients = gradients
        live = dict(zip((unit.name for unit in part.units), units, strict=True))
        mine = sorted({unit.stage for unit in part.units if unit.name} | {part.units[0].stage})
        self._units = {piece: [live[unit.name] for unit in units_of_piece(part, piece)] for piece in mine}
        self._uses = Counter(unit.number for held in self._units.values() for unit in held)
        """Unit -> how many of this rank's pieces use it; only the root has more than one."""
        self.all_step = part.policy.sharding.keep_gathered == "step"
        """Whether everything stays gathered for the whole step."""
        self._packings = {piece: saved_views.Packing() for piece in mine}
        self._ended: Counter[int] = Counter()
        """Unit -> micro-batches that have ended in it, once per piece."""
        self._tree = part.policy.tree
        self._ends: Counter[tuple[int, int]] = Counter()
        """(unit, micro-batch) -> the pieces in which it has ended."""
        self.are_ends_summed = False
        """Whether both ends of the pipeline have the summed gradients of parameters that they tie."""
        self._taken: Counter[int] = Counter()
        """Unit -> its micro-batches that are in the tree."""
        self._micro_batches = 0

    # --- parameters -------------------------------------------------------------------------------------

    def gather(self, piece: int | None = None) -> None:
        for unit in self._of(piece):
            unit.start_gather()
        for unit in self._of(piece):
            unit.gather()

    def release(self, piece: int | None = None) -> None:
        if piece is None or not self.all_step:
            for unit in self._of(piece):
                unit.release()

    def pack(self, piece: int, left: Sequence[torch.Tensor]) -> None:
        """Drop the parameters that autograd has saved for the backward of these outputs of a piece."""
        if not self.all_step:
            gathered = [segment for unit in self._of(piece) for segment in unit.segments if segment.gathers]
            self._packings[piece].pack(left, BEFORE_ALL, gathered, lambda: self.gather(piece))

    def _of(self, piece: int | None) -> Iterator[LiveUnit]:
        of_pieces = self._units.values() if piece is None else [self._units[piece]]
        yield from dict.fromkeys(unit for units in of_pieces for unit in units)

    # --- gradients --------------------------------------------------------------------------------------

    def begin(self, micro_batches: int) -> None:
        self.are_ends_summed = False
        self._ended.clear()
        self._ends.clear()
        self._taken.clear()
        self._micro_batches = micro_batches
        if not self._tree:
            self._gradients.land_in_place(self._segments(self._of(None)))

    @contextlib.contextmanager
    def backward(self, piece: int, micro_batch: int) -> Iterator[None]:
        """Return the context of a micro-batch's backward in a piece, or of one of its halves."""
        segments = self._segments(self._units[piece]) if self._tree else []
        self._gradients.open_parts(segments, micro_batch)
        yield
        self._gradients.close_parts(segments, micro_batch)

    def ended(self, piece: int, micro_batch: int) -> None:
        """End a micro-batch in a piece, which has all its weight gradients. Reduce now what is reduced after
        every micro-batch: all data ranks run one schedule, so they do this in one order."""
        for unit in self._units[piece]:
            self._ended[unit.number] += 1
            self._ends[unit.number, micro_batch] += 1
        if self._tree:
            self._add_to_tree(self._units[piece])
            return
        whole = [
            unit for unit in self._units[piece] if self._ended[unit.number] % self._uses[unit.number] == 0
        ]
        every = [segment for segment in self._segments(whole) if segment.update.reduce.when == "every"]
        self._gradients.reduce(every)
        left = {
            segment.number
            for unit in whole
            for segment in unit.segments
            if self._ended[unit.number] < self._micro_batches * self._uses[unit.number]
        }
        self._gradients.land_in_place([segment for segment in every if segment.number in left])

    def _add_to_tree(self, units: list[LiveUnit]) -> None:

        def has_next(unit: LiveUnit) -> bool:
            return self._ends[unit.number, self._taken[unit.number]] == self._uses[unit.number]

        while whole := [unit for unit in units if has_next(unit)]:
            self._gradients.take_parts(self._segments(whole))
            self._taken.update(unit.number for unit in whole)

    def end(self) -> None:
        """End the schedule."""
        counts = {number: count // self._uses[number] for number, count in self._ended.items()}
        if set(counts.values()) - {self._micro_batches}:
            raise AssertionError(f"micro-batches per unit {counts}, not {self._micro_batches}")

    def sum_over_ends(self, comm: Collectives) -> None:
        """Sum what is tied across the pipeline: see [Note: tied across the pipeline] of `plan/stages.py`."""
        self.are_ends_summed = True
        for segment in self._segments(self._of(None)):
            if segment.reduced is not None and is_tied_across_ranks(self._part, segment.spec):
                comm.all_reduce(segment.reduced, segment.reduced, "ends", Sum(segment.reduced.dtype))

    def _segments(self, units: list[LiveUnit] | Iterator[LiveUnit]) -> list[TrainedSegment]:
        """Return the trained segments, in the order in which they are reduced."""
        by_name = {unit.spec.name: unit for unit in units}
        order = [by_name[spec.name] for spec in reduce_order([unit.spec for unit in by_name.values()])]
        return [segment for unit in order for segment in unit.trained]
