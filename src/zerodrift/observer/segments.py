"""Where the native engine keeps what `observe` looks at: in segments.

Invariant: what is seen is a tensor's dtype or a recorded call; the plan only says which call was whose.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zerodrift.comm.collectives import Recorded
from zerodrift.engine.engine import Engine
from zerodrift.engine.native import native
from zerodrift.engine.step.segment import FlatSegment
from zerodrift.engine.step.trained_segment import trained_of
from zerodrift.observer.observed import Column, Observed, name
from zerodrift.plan.schedule import collectives
from zerodrift.plan.table import Plan

_REDUCES = {"shard": "reduce_scatter", "expert_shard": "reduce_scatter", "replicate": "all_reduce"}


class Segments:
    """`ObservedEngine` of an engine of the native backend."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._executor = engine, native(engine.executor)
        segments = self._executor.segments
        self._held: dict[int, FlatSegment] = {}
        for segment in segments:
            self._held[segment.full.untyped_storage()._cdata] = segment
        self._starts = {s.number: [row.offset for row in s.rows] for s in segments}
        self._names = {row.name: _name_of_all(engine.plan, row.name) for row in engine.part.rows}
        """A parameter by the plan's name for it, which a stage may know by another."""

    def parameter_of(self, tensor: torch.Tensor) -> str | None:
        segment = self._held.get(tensor.untyped_storage()._cdata)
        if segment is None:
            return None
        number = bisect.bisect_right(self._starts[segment.number], tensor.storage_offset()) - 1
        return self._names[segment.rows[number].name] if number >= 0 else None

    def forwards(self) -> Sequence[torch.nn.Module]:
        return self._executor.forwards

    def trained(self) -> Mapping[int, str]:
        return {
            id(parameter): self._names[row.name]
            for segment in trained_of(self._executor.segments)
            for row, parameter in zip(segment.rows, segment.parameters, strict=True)
        }

    @contextlib.contextmanager
    def watching(self, seen: Observed) -> Iterator[None]:
        """Sees the flat gradients that the update reads, and what is sent."""
        with self._engine.comm.record() as log, self._watching_update(seen):
            yield
        for segment, column, what in _sent(self._engine, log):
            for row in segment.rows:
                seen.see(self._names[row.name], column, what)

    @contextlib.contextmanager
    def _watching_update(self, seen: Observed) -> Iterator[None]:
        updater: Any = self._engine.updater
        if updater is None:
            yield
            return
        update = updater.update

        def watched(gradients: Mapping[int, torch.Tensor], *rest: Any) -> None:
            update(_Read(gradients, see), *rest)

        def see(number: int, flat: torch.Tensor) -> None:
            for row in self._executor.segments[number].rows:
                seen.see(self._names[row.name], "accumulate", name(flat.dtype))

        updater.update = watched
        try:
            yield
        finally:
            del updater.update

    def resting(self, seen: Observed) -> None:
        updater = self._engine.updater
        for segment in self._executor.segments:
            for row in segment.rows:
                seen.see(self._names[row.name], "storage", name(segment.storage.dtype))
        if updater is None:
            return
        for segment in trained_of(self._executor.segments):
            master, moments = updater.resting(segment.number)
            for row in segment.rows:
                seen.see(self._names[row.name], "master", _master(master, segment.storage.dtype))
                for dtype in moments:
                    seen.see(self._names[row.name], "state", name(dtype))


class _Read(Mapping[int, torch.Tensor]):
    """Gradients by segment that are seen when they are asked for, which may be what makes them."""

    def __init__(
        self, gradients: Mapping[int, torch.Tensor], see: Callable[[int, torch.Tensor], None]
    ) -> None:
        self._gradients, self._see = gradients, see

    def __getitem__(self, number: int) -> torch.Tensor:
        gradient = self._gradients[number]
        self._see(number, gradient)
        return gradient

    def __contains__(self, number: object) -> bool:
        return number in self._gradients

    def __iter__(self) -> Iterator[int]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)


def _master(held: torch.dtype | None, storage: torch.dtype) -> str:
    """The plan's word for what is held beyond storage."""
    if held is None:
        return "same"
    split = storage is torch.bfloat16 and held.itemsize == 2 and not held.is_floating_point
    return "split" if split else name(held)


# --- what was sent ------------------------------------------------------------------------------------


def _sent(engine: Engine, log: list[Recorded]) -> Iterator[tuple[FlatSegment, Column, str]]:
    """Whose calls were seen, and what they carried.

    Reductions come in the plan's order, so the nth is the plan's nth. Gathers come when they are needed, and
    in a pipeline reductions when its schedule has them: those are told by their size, and where it fits
    several segments, all calls of that size stand for them."""
    segments = native(engine.executor).segments
    planned = list(collectives(engine.plan, engine.mesh.rank("pipeline")))
    for axis, op in _REDUCES.items():
        calls = [call for call in log if call.op == op and call.axis == axis and call.dtype.is_floating]
        wanted = [call for call in planned if call.purpose in ("reduce", "replicate") and call.axis == axis]
        if engine.plan.policy.pipeline is None:
            pairs = list(zip(calls, wanted, strict=False))
        else:
            pairs = [(call, like) for like in wanted for call in calls]
        for call, like in pairs:
            if call.numel == like.numel:
                wire, total = name(call.dtype.torch), name((call.sum or call.dtype).torch)
                yield segments[like.segment], "reduce", wire if wire == total else f"{wire}>{total}"
    gathers = [call for call in planned if call.purpose in ("forward", "backward")]
    for numel in {call.numel for call in gathers}:
        fitting = {call.segment: call.dtype for call in gathers if call.numel == numel}
        dtypes = {call.dtype for call in log if call.op == "all_gather" and call.numel == numel}
        for number, dtype in fitting.items():
            for what in {dtype} if dtypes == set(fitting.values()) else dtypes:
                yield segments[number], "gather", name(what.torch)


def _name_of_all(plan: Plan, known: str) -> str:
    row = plan.row(known)
    if row is None:
        raise AssertionError(f"{known} is not in the plan")
    return row.name
