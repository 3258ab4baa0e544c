"""Read and fill the slices that this rank owns, as flat pieces with the place of each parameter.

For checkpoints, export and streaming load, which move a model without a full tensor anywhere. Reading and
filling are local to a rank and take one segment at a time. `Engine.sync_storage` is the one collective call,
after everything is filled.

Invariant: over all ranks the parts that are read are every element of the model, each exactly once. After
`sync_storage` the visible values are the filled masters, rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from zerodrift.comm import Collectives, Mesh
from zerodrift.dtypes import BLOCK
from zerodrift.engine.habits.storage_writes import take_back_memory, take_over_writes
from zerodrift.engine.place import exchange, share_of
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.trained_segment import TrainedSegment
from zerodrift.kernels import PackedRun
from zerodrift.optim import Updater
from zerodrift.plan import Row


@dataclass(frozen=True, slots=True)
class Span:
    """A run of elements of one parameter, and its place in a flat piece."""

    row: Row
    start: int
    """First element, in the row-major flattening of the parameter."""
    place: slice

    @property
    def numel(self) -> int:
        return self.place.stop - self.place.start


class SegmentShard(Protocol):
    """The flat piece of one segment that this rank holds: the slice of its optimizer, or frozen storage.

    Flat tensors in and out have `numel` elements. Weights have `dtype`: fp32 if there is a master, else that
    of storage. `rows` are all rows of the segment. This rank holds `held` of them, reads `share`, which no
    other rank reads, and fills `filled` from files. `updated` says that an optimizer owns the piece. Frozen
    values in a narrow format rest in `packed`, and are decoded to fp32.
    """

    held: tuple[Span, ...]
    share: tuple[Span, ...]
    filled: tuple[Span, ...]
    rows: tuple[Row, ...]
    numel: int
    dtype: torch.dtype
    updated: bool

    @property
    def packed(self) -> PackedRun | None:
        return None

    def zeros(self) -> torch.Tensor: ...
    def weights(self) -> torch.Tensor:
        """Return the masters, exact; storage where there is none."""

    def stored(self) -> torch.Tensor:
        """Return the values that the model uses, in the dtype of storage, or of compute if they travel
        narrow."""

    def moments(self) -> dict[str, torch.Tensor]:
        """Return moments in fp32 by torch's names; none before the first step."""

    def set_weights(self, values: torch.Tensor) -> None:
        """Write master and owned storage."""

    def set_filled(self, values: torch.Tensor, comm: Collectives) -> None:
        """Write weights of which every rank has filled `filled`; a call of all ranks."""
        self.set_weights(values)

    def set_moment(self, key: str, values: torch.Tensor) -> None: ...

    @property
    def feedback(self) -> torch.Tensor | None:
        """Return the part of this rank's gradients of all rows that a narrow wire has lost, or None."""
        return None

    def set_feedback(self, values: torch.Tensor | None) -> None:
        """Replace the feedback, up to the end of the last row, if the wire is narrow."""
        return


class FlatShard:
    """A `SegmentShard` of a native segment."""

    def __init__(self, segment: FlatSegment, updater: Updater | None, copy: tuple[int, int]) -> None:
        self.segment = segment
        self.rows = tuple(segment.rows)
        self._updater = updater if isinstance(segment, TrainedSegment) else None
        self._wire = segment.wire if isinstance(segment, TrainedSegment) else None
        self.updated = self._updater is not None
        self._storage = segment.owned
        self.packed = segment.packed
        self.numel = self._storage.numel() if self.packed is None else self.packed.numel
        self.dtype = torch.float32 if self.updated or self.packed is not None else self._storage.dtype
        # Not by `start_of`: packed storage has fewer elements in memory.
        start = 0 if self.numel == segment.spec.padded else segment.rank * self.numel
        self.held = tuple(spans_of(segment, start, start + self.numel, start))
        index, copies = copy
        blocks = self.numel // BLOCK
        low, high = (BLOCK * (blocks * n // copies) for n in (index, index + 1))
        mine = spans_of(segment, start + low, start + high, start) if segment.spec.lead else ()
        self.share = tuple(mine)
        filled = share_of(segment, segment.rank)
        self.filled = tuple(spans_of(segment, filled.start, filled.stop, start))

    @property
    def feedback(self) -> torch.Tensor | None:
        return None if self._wire is None else self._wire.feedback

    def set_feedback(self, values: torch.Tensor | None) -> None:
        if self._wire is None:
            return
        self._wire.feedback = None
        if values is not None:
            whole = values.new_zeros(self.segment.spec.padded)
            whole[: values.numel()] = values
            self._wire.feedback = whole

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.numel, dtype=self.dtype, device=self._storage.device)

    def weights(self) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.values()
        if self._updater is None:
            return self._storage.detach()
        take_over_writes(self.segment, self._updater)
        return self._updater.master(self.segment.number)

    def stored(self) -> torch.Tensor:
        if self.segment.narrow is not None:
            return self.segment.as_shown(self.weights())
        return self._storage.detach()

    def moments(self) -> dict[str, torch.Tensor]:
        return {} if self._updater is None else self._updater.states(self.segment.number)

    @torch.no_grad()
    def set_weights(self, values: torch.Tensor) -> None:
        if self.packed is not None:
            self.packed.store(values)
        elif self._updater is None:
            self._storage.copy_(values)
        else:
            self._updater.set_master(self.segment.number, values)

    def set_filled(self, values: torch.Tensor, comm: Collectives) -> None:
        exchange(self.segment, values, comm)
        if self.updated or self.packed is not None:  # else it is storage itself
            self.set_weights(values)

    def set_moment(self, key: str, values: torch.Tensor) -> None:
        assert self._updater is not None
        self._updater.set_state(self.segment.number, key, values)


def pieces(segments: Iterable[FlatSegment], updater: Updater | None, mesh: Mesh) -> Iterator[FlatShard]:
    """Yield one piece per segment."""
    replica, replicas = mesh.rank("replicate"), mesh.size("replicate")
    for segment in segments:
        take_back_memory(segment)
        sliced = bool(segment.update.axis) if isinstance(segment, TrainedSegment) else segment.sharded
        alike = 1 if sliced else segment.ranks
        # (number of this rank, number of ranks) among the ranks that hold the same piece.
        copy = replica * alike + (0 if sliced else segment.rank), replicas * alike
        yield FlatShard(segment, updater, copy)


def spans_of(segment: FlatSegment, low: int, high: int, origin: int) -> Iterator[Span]:
    """Yield the span of each row in [low, high) of the segment, in a piece that begins at `origin`."""
    for row in segment.rows:
        here = row.within(low, high - low)
        if here.start < here.stop:
            start = segment.first_of(row) + low + here.start - row.offset
            yield Span(row, start, slice(low + here.start - origin, low + here.stop - origin))
