"""What this rank owns, by parameter name, as flat pieces; and the way back in.

For whoever moves a model out of an engine or into it without a full tensor anywhere: checkpoints, export,
streaming load. Reading and filling are local to a rank and go one segment at a time, so what is held beside
the engine is one segment's values. `sync_storage` is the one collective call, once everything is filled.

Invariant: over all ranks the parts that are read are every element of the model, each exactly once; and
after `sync_storage` what is visible is the masters that were filled, rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import Mesh
from zerodrift.dtypes import BLOCK
from zerodrift.engine.habits.storage_writes import take_over_writes
from zerodrift.engine.place import exchange, share_of
from zerodrift.engine.step.segment import FlatSegment
from zerodrift.engine.step.trained_segment import TrainedSegment
from zerodrift.optim.updater import Updater
from zerodrift.plan.table import Row


@dataclass(frozen=True, slots=True)
class Part:
    """A run of elements of one parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """First element, in the row-major flattening of the parameter."""
    values: torch.Tensor
    """`[elements]`, contiguous."""

    @property
    def numel(self) -> int:
        """Of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Span:
    """A run of elements of one parameter, and where it lies in a flat piece of its segment."""

    row: Row
    start: int
    """First element, in the row-major flattening of the parameter."""
    place: slice
    """Of the flat piece."""

    @property
    def numel(self) -> int:
        return self.place.stop - self.place.start

    def part(self, flat: torch.Tensor) -> Part:
        return Part(self.row.name, self.row.whole_shape, self.start, flat[self.place])


class FlatShard:
    """The flat piece of one segment that this rank holds: what its optimizer owns, or frozen storage.

    At stage 0, and on every replica, several ranks hold the same piece. All of them fill it; when it is
    read, each takes its share.
    """

    def __init__(self, segment: FlatSegment, updater: Updater | None, copy: tuple[int, int]) -> None:
        self.segment = segment
        self._updater = updater if isinstance(segment, TrainedSegment) else None
        self._storage = segment.owned
        start = 0 if self.numel == segment.spec.padded else segment.rank * self.numel
        self.held = tuple(_spans(segment, start, start + self.numel, start))
        """All that this rank holds."""
        index, copies = copy
        blocks = self.numel // BLOCK
        low, high = (BLOCK * (blocks * n // copies) for n in (index, index + 1))
        mine = _spans(segment, start + low, start + high, start) if segment.spec.lead else ()
        self.share = tuple(mine)
        """The part of it that no other rank reads."""
        filled = share_of(segment, segment.rank)
        self.filled = tuple(_spans(segment, filled.start, filled.stop, start))
        """What this rank fills where values come from files."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """All that have a part in it, on whatever rank."""
        return tuple(self.segment.rows)

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self._storage.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights in and out: fp32 where there is a master, else that of storage."""
        return self._storage.dtype if self._updater is None else torch.float32

    @property
    def updated(self) -> bool:
        """Whether an optimizer owns it: there is a master, and there may be moments."""
        return self._updater is not None

    def zeros(self) -> torch.Tensor:
        """`[numel]`, to be filled and handed to `set_weights`."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self._storage.device)

    def weights(self) -> torch.Tensor:
        """`[numel]`: the masters, exact; storage where there is none."""
        if self._updater is None:
            return self._storage.detach()
        take_over_writes(self.segment, self._updater)
        return self._updater.master(self.segment.number)

    def stored(self) -> torch.Tensor:
        """`[numel]`: the bits that the model sees, in the storage dtype."""
        return self._storage.detach()

    def moments(self) -> dict[str, torch.Tensor]:
        """`[numel]` in fp32 by torch's names; none before the first step."""
        return {} if self._updater is None else self._updater.states(self.segment.number)

    @torch.no_grad()
    def set_weights(self, values: torch.Tensor) -> None:
        """Master and owned storage become `values`, `[numel]`. Others see it after `Shards.sync_storage`."""
        if self._updater is None:
            self._storage.copy_(values)
        else:
            self._updater.set_master(self.segment.number, values)

    def set_filled(self, values: torch.Tensor, comm: Collectives) -> None:
        """`set_weights` of what `weights` returned, in which every rank has filled `filled`."""
        exchange(self.segment, values, comm)
        if self.updated:  # else it is storage itself
            self.set_weights(values)

    def set_moment(self, key: str, values: torch.Tensor) -> None:
        if self._updater is None:
            raise AssertionError(f"segment {self.segment.number} has no optimizer")
        self._updater.set_state(self.segment.number, key, values)


class SegmentShard(Protocol):
    """A piece of any executor; what `FlatShard` says of these holds."""

    @property
    def held(self) -> tuple[Span, ...]: ...
    @property
    def share(self) -> tuple[Span, ...]: ...
    @property
    def filled(self) -> tuple[Span, ...]: ...
    @property
    def rows(self) -> tuple[Row, ...]: ...
    @property
    def numel(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def updated(self) -> bool: ...
    def zeros(self) -> torch.Tensor: ...
    def weights(self) -> torch.Tensor: ...
    def stored(self) -> torch.Tensor: ...
    def moments(self) -> dict[str, torch.Tensor]: ...
    def set_weights(self, values: torch.Tensor) -> None: ...
    def set_filled(self, values: torch.Tensor, comm: Collectives) -> None: ...
    def set_moment(self, key: str, values: torch.Tensor) -> None: ...


class Sharded(Protocol):
    """An engine of any backend."""

    def pieces(self) -> Iterator[SegmentShard]:
        """One per segment, in the order of the plan."""

    def sync_storage(self) -> None:
        """See `Shards.sync_storage`."""


class Shards:
    """The pieces of one engine on this rank."""

    def __init__(self, engine: Sharded) -> None:
        self._engine = engine

    def pieces(self) -> Iterator[SegmentShard]:
        """One per segment, in the order of the plan."""
        return self._engine.pieces()

    def weights(self) -> Iterator[Part]:
        """This rank's share of the weights: fp32 masters, frozen rows in their storage dtype."""
        for piece in self.pieces():
            if piece.share:
                flat = piece.weights()
                yield from (span.part(flat) for span in piece.share)

    def stored(self) -> Iterator[Part]:
        """This rank's share of the bits that the model sees."""
        for piece in self.pieces():
            flat = piece.stored()
            yield from (span.part(flat) for span in piece.share)

    def moments(self) -> Iterator[tuple[str, Part]]:
        """This rank's share of the optimizer's moments in fp32, each with torch's name for it; only of
        parameters that the optimizer was given."""
        for piece in self.pieces():
            if piece.updated and piece.share:
                for key, flat in piece.moments().items():
                    yield from ((key, span.part(flat)) for span in piece.share)

    def sync_storage(self) -> None:
        """After filling, on every rank alike: storage that is whole gets the other ranks' slices, and what
        was gathered from older values is given up."""
        self._engine.sync_storage()


def pieces(segments: Iterable[FlatSegment], updater: Updater | None, mesh: Mesh) -> Iterator[FlatShard]:
    """One per segment."""
    for segment in segments:
        yield FlatShard(segment, updater, _copy(segment, mesh))


def _copy(segment: FlatSegment, mesh: Mesh) -> tuple[int, int]:
    """(which, of how many): ranks that hold the same piece."""
    sliced = bool(segment.update.axis) if isinstance(segment, TrainedSegment) else segment.sharded
    replica, replicas = mesh.rank("replicate"), mesh.size("replicate")
    if sliced:
        return replica, replicas
    return replica * segment.ranks + segment.rank, replicas * segment.ranks


def reduced_parts(
    segments: Iterable[TrainedSegment], mesh: Mesh
) -> Iterator[tuple[Sequence[Span], torch.Tensor]]:
    """The gradients of a step that are reduced, each element on one rank."""
    for segment in segments:
        if segment.reduced is not None and segment.spec.lead and not mesh.rank("replicate"):
            count = segment.reduced.numel()
            start = 0 if count == segment.spec.padded else segment.rank * count
            yield tuple(_spans(segment, start, start + count, start)), segment.reduced


def _spans(segment: FlatSegment, low: int, high: int, origin: int) -> Iterator[Span]:
    """What lies of each row in `[low, high)` of the segment, for a piece that begins at `origin`."""
    for row in segment.rows:
        first, last = max(row.offset, low), min(row.offset + row.numel, high)
        if first < last:
            start = segment.first_of(row) + first - row.offset
            yield Span(row, start, slice(first - origin, last - origin))
