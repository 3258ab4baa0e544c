"""Buffers that gradients accumulate in, their sums by a tree, and counts of what has arrived.

Invariants: a buffer is in one pool or in use, never both, and holds anything when it is taken. The tree sum
of n buffers is `additions(n)` of them, whatever n turns out to be. A gradient that the ledger counted is in
what is collected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerodrift.comm.fold import carries, leftovers
from zerodrift.engine.step.segment import FlatSegment
from zerodrift.errors import ModelError, Problems


class BufferPool:
    """Flat buffers that segments of one size take turns in. Fresh memory costs a page fault per 4 KiB: as
    much as what is then done with it."""

    def __init__(self, *, one_size: bool) -> None:
        """With `one_size`, free buffers go as soon as another size is asked for: for buffers that are full
        for a moment only, of which there would be one for every size there is."""
        self._one_size = one_size
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer with anything in it."""
        free = self._free.get((numel, dtype))
        if free:
            return free.pop()
        if self._one_size:
            self._free.clear()
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, flat: torch.Tensor) -> None:
        self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)

    def clear(self) -> None:
        self._free.clear()


class GradientBuffers:
    """The plan's accumulators, and all other buffers of gradients."""

    def __init__(self, *, keep: bool) -> None:
        self.sums = BufferPool(one_size=not keep)
        self.spare = BufferPool(one_size=True)
        self._keep = keep

    def end_step(self) -> None:
        """Free spare memory, and the accumulators' too unless the plan keeps it."""
        self.spare.clear()
        if not self._keep:
            self.sums.clear()


class TreeSum:
    """The sum of a rank's micro-batches under `reduce.order: tree`, by the binary tree of `comm/fold.py`. It
    holds at most log2(m + 1) buffers of m micro-batches, owns what is added to it, and returns a buffer that
    it has no more use for to `give`."""

    def __init__(self, give: Callable[[torch.Tensor], None]) -> None:
        self._give = give
        self._sums: dict[int, torch.Tensor] = {}
        """First part -> partial sum that waits for others."""
        self.count = 0
        """Parts added so far."""

    def __bool__(self) -> bool:
        return bool(self.count)

    def add(self, part: torch.Tensor) -> None:
        self._sums[self.count] = part
        self._add(carries(self.count))
        self.count += 1

    @property
    def neighbour(self) -> torch.Tensor | None:
        """The part that the next one is added to first, if it is a single part. A caller who has the next one
        in pieces may add them there and call `added`."""
        return self._sums[self.count - 1] if self.count % 2 else None

    def added(self) -> None:
        """Count a part that was added to `neighbour` in place."""
        self._add(itertools.islice(carries(self.count), 1, None))
        self.count += 1

    def take(self) -> torch.Tensor:
        """Return the whole sum, in the buffer of its first part, and begin anew."""
        self._add(leftovers(self.count))
        self.count = 0
        return self._sums.pop(0)

    def drop(self) -> list[torch.Tensor]:
        """Return the buffers of all partial sums, in the order of their parts, and begin anew."""
        self.count = 0
        held = list(self._sums.values())
        self._sums.clear()
        return held

    @torch.no_grad()
    def _add(self, pairs: Iterator[tuple[int, int]]) -> None:
        for left, right in pairs:
            part = self._sums.pop(right)
            self._sums[left].add_(part)
            self._give(part)


@dataclass(frozen=True, slots=True)
class GradientCounts:
    """How often gradients of one parameter arrived in one micro-batch."""

    eager: int = 0
    """Added by autograd in a backward; a parameter that is used several times is added to once."""
    late: int = 0
    """Formed from a queue, or written to `param.grad` between backwards."""

    @property
    def count(self) -> int:
        return self.eager + self.late


class Ledger:
    """Counts arrivals per parameter and micro-batch in a step that has late gradients; it costs a hook per
    parameter. `param.grad = new` instead of `param.grad += new` is an error that names the parameter."""

    def __init__(self, segments: Iterable[FlatSegment]) -> None:
        self._names: dict[torch.Tensor, str] = {}
        self._handles: list[Any] = []
        for segment in segments:
            for row, parameter in zip(segment.rows, segment.parameters, strict=True):
                self._names[parameter] = row.name
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._eager))
        self._counts: list[dict[str, GradientCounts]] = [{}]
        self.now = 0
        """The micro-batch whose backward is running."""
        self._addresses: dict[torch.Tensor, int] = {}
        """Parameter -> address of its gradient after the last arrival."""
        self._replaced: set[torch.Tensor] = set()

    def _eager(self, parameter: torch.Tensor) -> None:
        self._count(parameter, self.now, eager=1)

    def late(self, parameter: torch.Tensor, micro_batch: int) -> None:
        """Count a late gradient of a micro-batch of this step."""
        self._count(parameter, micro_batch, late=1)

    def turn_to(self, micro_batch: int) -> None:
        """Count eager gradients for this micro-batch from now on."""
        self.now = micro_batch

    def _count(self, parameter: torch.Tensor, micro_batch: int, eager: int = 0, late: int = 0) -> None:
        name = self._names.get(parameter)
        if name is None or parameter.grad is None:
            return
        while len(self._counts) <= micro_batch:
            self._counts.append({})
        counts = self._counts[micro_batch]
        before = counts.get(name, GradientCounts())
        counts[name] = replace(before, eager=before.eager + eager, late=before.late + late)
        self._compare(parameter)
        self._addresses[parameter] = parameter.grad.data_ptr()

    def _compare(self, parameter: torch.Tensor) -> None:
        """Notice a gradient that is not where the last arrival left it."""
        expected = self._addresses.get(parameter)
        address = None if parameter.grad is None else parameter.grad.data_ptr()
        # Under `create_graph` autograd itself puts old + new in the old one's place.
        if expected is not None and address != expected and not torch.is_grad_enabled():
            self._replaced.add(parameter)

    def check(self, segment: FlatSegment) -> None:
        """Raise if a counted gradient is missing; called before a segment's gradients are collected."""
        problems = Problems()
        for row, parameter in zip(segment.rows, segment.parameters, strict=True):
            self._compare(parameter)
            self._addresses.pop(parameter, None)
            if parameter in self._replaced:
                problems.add(
                    row.name,
                    "a gradient that has arrived must be added to, `param.grad += new`",
                    got="`param.grad` set to something else",
                    do="What was there before would be lost.",
                )
        problems.raise_as(ModelError)

    def arrivals(self) -> list[dict[str, GradientCounts]]:
        """Return name -> counts for each micro-batch of this step that has ended."""
        missing = max(0, self.now - len(self._counts))
        return [dict(counts) for counts in (*self._counts[: self.now], *({},) * missing)]

    def clear(self) -> None:
        """Begin a new step."""
        self._counts = [{}]
        self.now = 0
        self._addresses.clear()
        self._replaced.clear()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
