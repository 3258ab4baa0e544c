"""Read and write whole values by parameter name: values, masters, gradients, moments.

For people, tests and tools; no step uses this. All ranks read and write the same parameters in the same
order. Values are copies, except in `gathered`, which shows the parameters themselves.

Invariant: reading changes nothing. Writing changes the master, from which visible values follow. If one rank
cannot write a value, no rank does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zerodrift.comm import Collectives, raise_on_all_ranks
from zerodrift.engine.habits import storage_writes as writes
from zerodrift.engine.habits.parameter_guard import ParameterGuard
from zerodrift.engine.progress import TrainingProgress
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.shards import FlatShard
from zerodrift.engine.step.reduce import Gradients
from zerodrift.engine.trained_segment import TrainedSegment
from zerodrift.errors import ModelError, Problems, UnsupportedError, did_you_mean
from zerodrift.optim import Updater
from zerodrift.plan import Plan, Row


class WholeValues(Protocol):
    """Reads and writes whole tensors of the plan's rows in an executor."""

    def gathered(
        self, rows: Mapping[str, Row], write: bool
    ) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]: ...
    def shape(self, row: Row) -> tuple[int, ...]: ...
    def value(self, row: Row) -> torch.Tensor: ...
    def set_value(self, row: Row, value: torch.Tensor) -> None: ...
    def master(self, row: Row) -> torch.Tensor: ...
    def set_master(self, row: Row, value: torch.Tensor) -> None: ...

    def has_gradient(self, row: Row) -> bool:
        """Return whether this step has a gradient, after reducing what waits to be reduced."""

    def gradient(self, row: Row, unscale: float) -> torch.Tensor:
        """Return the sum, in fp32, times `unscale`."""

    def set_gradient(self, row: Row, value: torch.Tensor) -> None: ...
    def moment_names(self, row: Row) -> tuple[str, ...]: ...
    def moments(self, row: Row) -> dict[str, torch.Tensor]: ...
    def set_moment(self, row: Row, key: str, value: torch.Tensor) -> None: ...


class ParameterHandle:
    """A parameter of an engine. Made by `Engine.parameter`.

    `value`, `master`, `gradient` and the items of `state` are whole on every rank and may be assigned. All
    ranks read and assign together, and get what rank 0 assigns.
    """

    __slots__ = ("_comm", "_progress", "_values", "name", "row")

    def __init__(
        self, name: str, row: Row, values: WholeValues, progress: TrainingProgress, comm: Collectives
    ) -> None:
        self.name, self.row = name, row
        self._values, self._progress, self._comm = values, progress, comm

    def __repr__(self) -> str:
        return f"ParameterHandle({self.name!r}, {list(self.shape)})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self._values.shape(self.row)

    @property
    def value(self) -> torch.Tensor:
        """The value that the model computes with, in the compute dtype. An assignment changes the master too,
        except where an element stays the same."""
        return self._values.value(self.row)

    @value.setter
    def value(self, value: torch.Tensor) -> None:
        with raise_on_all_ranks(self._comm):
            self._check(f"{self.name}.value", value, self.row.columns.compute.torch)
        self._values.set_value(self.row, value)

    @property
    def master(self) -> torch.Tensor:
        """The value that the optimizer updates, in fp32."""
        return self._values.master(self.row)

    @master.setter
    def master(self, value: torch.Tensor) -> None:
        with raise_on_all_ranks(self._comm):
            self._check(f"{self.name}.master", value)
        self._values.set_master(self.row, self._of_rank_0(value))

    @property
    def gradient(self) -> torch.Tensor:
        """The gradient accumulated so far in this step, averaged and unscaled, in fp32; zeros if there is
        none."""
        self._require_trained()
        self._progress.require_whole_sum(self.name)
        if self._values.has_gradient(self.row):
            return self._values.gradient(self.row, self._progress.unscale)
        return torch.zeros(self.shape, device=self._comm.mesh.device)

    @gradient.setter
    def gradient(self, value: torch.Tensor) -> None:
        self._require_trained()
        self._progress.require_whole_sum(self.name)
        there = self._values.has_gradient(self.row)
        with raise_on_all_ranks(self._comm):
            self._check(f"{self.name}.gradient", value)
            if not there:
                must, do = "must have a gradient to replace", "Assign it after a backward, before `step`."
                raise UnsupportedError(self.name, must, got="none in this step", do=do)
        self._values.set_gradient(self.row, self._of_rank_0(value) / self._progress.unscale)

    @property
    def state(self) -> Moments:
        """The optimizer's moments in fp32, by torch's names; none before the first step. An assignment to an
        item replaces the optimizer's."""
        self._require_trained()
        return Moments(self, self._values.moments(self.row))

    def set_moment(self, key: str, value: torch.Tensor) -> None:
        """Replace a moment as `state[key] = value` does, without reading the moments."""
        self._require_trained()
        known = self._values.moment_names(self.row)
        with raise_on_all_ranks(self._comm):
            if key not in known:
                must, got = f"must have optimizer state {key!r}", ", ".join(known) or "none yet"
                raise ModelError(self.name, must, got=got, do="State is there after the first step.")
            self._check(f"{self.name}.state[{key!r}]", value)
        self._values.set_moment(self.row, key, self._of_rank_0(value))

    def _of_rank_0(self, value: torch.Tensor) -> torch.Tensor:
        """Return rank 0's value in fp32."""
        sent = value.detach().to(self._comm.mesh.device, torch.float32, copy=True).contiguous()
        self._comm.broadcast(sent.view(-1), 0, "data")
        return sent

    def _require_trained(self) -> None:
        if not self.row.trained:
            must = "must be trained to have a gradient or optimizer state"
            raise ModelError(self.name, must, got="a frozen parameter")

    def _check(self, what: str, value: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        """Require a whole tensor of a dtype that `dtype` holds exactly."""
        if not isinstance(value, torch.Tensor):
            raise ModelError(what, "must be a tensor", got=type(value).__name__)
        if tuple(value.shape) != self.shape:
            must = f"must have the shape of the whole parameter, {list(self.shape)}"
            raise ModelError(what, must, got=list(value.shape))
        if not value.is_floating_point() or torch.promote_types(value.dtype, dtype) is not dtype:
            word, other = (str(each).removeprefix("torch.") for each in (dtype, value.dtype))
            must = f"must be {word} or a floating dtype that it holds exactly"
            raise ModelError(what, must, got=other, do=f"Write `value.to(torch.{word})`.")


class Moments(Mapping[str, torch.Tensor]):
    """A copy of moments. An assignment to an item replaces the optimizer's moment too."""

    def __init__(self, parameter: ParameterHandle, read: dict[str, torch.Tensor]) -> None:
        self._parameter, self._read = parameter, read

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._read[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self._parameter.set_moment(key, value)
        self._read = dict(self._parameter.state)  # the optimizer may have rounded the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)

    def __repr__(self) -> str:
        return f"Moments of {self._parameter.name}: {', '.join(self._read) or 'none yet'}"


def row_of(plan: Plan, name: str) -> Row:
    """Return the row of a parameter, by any of its names."""
    row = plan.row(name)
    if row is None:
        todo = did_you_mean(name, [name for row in plan.rows for name in row.names])
        raise ModelError(name, "must be a parameter of the model", got="no such name", do=todo)
    return row


@dataclass(frozen=True, slots=True)
class SegmentValues:
    """The whole values of one rank's segments."""

    segments: Sequence[FlatSegment]
    updater: Updater | None
    gradients: Gradients
    guard: ParameterGuard
    comm: Collectives

    @contextlib.contextmanager
    def gathered(self, rows: Mapping[str, Row], write: bool) -> Iterator[dict[str, torch.Tensor]]:
        """Show whole values. With `write`, an exception on any rank undoes all changes."""
        segments = {row.segment: self._of(row) for row in rows.values()}
        self._take_over_writes(segments.values(), accept_all=write)
        kept = {number for number, segment in segments.items() if segment.is_full}
        for segment in segments.values():
            segment.start_gather()
        for segment in segments.values():
            writes.hold_full(segment)
        try:
            shown = {name: self._of(row).view(self._of(row).full, row) for name, row in rows.items()}
            if write:
                with self._writing(segments.values(), list(rows.values())):
                    yield shown
            else:
                yield shown
                self._require_unwritten(segments.values())
        finally:
            for number, segment in segments.items():
                writes.end_hold(segment, keep=number in kept)

    def _require_unwritten(self, segments: Iterable[FlatSegment]) -> None:
        problems = Problems()
        for segment in segments:
            for row in () if self.guard.is_open(segment) else writes.rows_written_while_held(segment):
                segment.is_stale = True
                do = "No other rank would have it, and it is dropped."
                problems.add(row.name, writes.WRITE, got=writes.READ, do=do)
        problems.raise_as(ModelError)

    @contextlib.contextmanager
    def _writing(self, segments: Iterable[FlatSegment], rows: list[Row]) -> Iterator[None]:
        """Keep writes inside the context when the outermost context ends, if no rank has raised."""
        guard, segments = self.guard, list(segments)
        outermost = not guard.opened
        before = [] if outermost else [(segment, segment.full.clone()) for segment in segments]
        guard.open(segments, rows)
        try:
            with raise_on_all_ranks(self.comm, "data"):
                yield
        except BaseException:
            guard.restore_parameters(segments)
            with torch.no_grad():
                for segment, full in before:
                    segment.full.copy_(full)
            if outermost:
                self._end_writing(commit=False)
            raise
        guard.take_over_assigned(segments)
        if outermost:
            self._end_writing(commit=True)

    def _end_writing(self, *, commit: bool) -> None:
        held = self.guard.close()
        try:
            for segment, rows in held if commit else ():
                self._write_back(segment, rows)
        finally:
            for segment, _ in held:
                segment.is_stale = True
                writes.end_hold(segment)
        for segment, _ in held if commit else ():
            writes.refresh_views(segment)

    def _write_back(self, segment: FlatSegment, rows: list[Row]) -> None:
        """Write rank 0's rows into master and storage. An unchanged element keeps every bit of its master,
        unless its row was loaded or assigned."""
        whole = self._whole_master(segment)
        replaced = torch.tensor([int(r.name in self.guard.replaced) for r in rows], device=whole.device)
        self.comm.broadcast(replaced, 0, "data")
        with torch.no_grad():
            for row, is_replaced in zip(rows, replaced.tolist(), strict=True):
                shown = segment.view(segment.full, row).clone()
                if row.parts == 1:
                    self.comm.broadcast(shown.view(-1), 0, "data")
                else:  # from the first rank that has the same experts
                    self.comm.broadcast(shown.view(-1), 0, segment.axis)
                    self.comm.broadcast(shown.view(-1), 0, "replicate")
                place = segment.view(whole, row)
                kept = (segment.as_shown(place) == shown) & (not is_replaced)
                if not kept.all():
                    place.copy_(torch.where(kept, place, shown.to(place.dtype)))
        self._set_whole_master(segment, whole)

    def _take_over_writes(self, segments: Iterable[FlatSegment], *, accept_all: bool = False) -> None:
        """Copy writes of user code into the masters, or raise; a call of all ranks."""
        separate = []
        for segment in segments:
            writes.take_back_memory(segment)
            separate += [segment] if segment.has_separate_master else []
        if separate:
            with raise_on_all_ranks(self.comm, "data"):
                for segment in separate:
                    writes.take_over_writes(segment, self.updater, accept_all=accept_all)

    def shape(self, row: Row) -> tuple[int, ...]:
        return row.whole_shape

    def value(self, row: Row) -> torch.Tensor:
        with self.gathered({row.name: row}, write=False) as shown:
            return self._all_of(row, shown[row.name])

    def set_value(self, row: Row, value: torch.Tensor) -> None:
        with self.gathered({row.name: row}, write=True) as shown, torch.no_grad():
            shown[row.name].copy_(self._part_of(row, value))

    def master(self, row: Row) -> torch.Tensor:
        segment = self._of(row)
        return self._all_of(row, segment.view(self._whole_master(segment), row))

    def set_master(self, row: Row, value: torch.Tensor) -> None:
        self.guard.require_closed(f"engine.parameter({row.name!r}).master")
        segment = self._of(row)
        whole = self._whole_master(segment)
        with torch.no_grad():
            segment.view(whole, row).copy_(self._part_of(row, value))
        segment.drop()
        self._set_whole_master(segment, whole)
        writes.refresh_views(segment)

    def _whole_master(self, segment: FlatSegment) -> torch.Tensor:
        """Gather a copy of the masters in fp32, or of storage if there is no master."""
        self._take_over_writes([segment])
        return self._whole(segment, self._piece(segment).weights().float())

    def _set_whole_master(self, segment: FlatSegment, whole: torch.Tensor) -> None:
        piece = self._piece(segment)
        piece.set_weights(whole if piece.numel == whole.numel() else segment.slice_of(whole))
        segment.sync_storage(self.updater).wait()
        writes.mark_storage_changed(segment)

    def has_gradient(self, row: Row) -> bool:
        self.gradients.flush()
        self.gradients.show_again()
        return self._trained(row).reduced is not None

    def gradient(self, row: Row, unscale: float) -> torch.Tensor:
        segment = self._trained(row)
        whole = segment.whole_gradient()
        summed = whole
        if self.comm.mesh.size("replicate") > 1:  # the step sums over replicas later
            summed = whole.clone()
            segment.add_replicas(summed, self.gradients.before)
        gradient = segment.view(summed, row).float() * unscale
        segment.give_back(whole)
        return self._all_of(row, gradient)

    def set_gradient(self, row: Row, value: torch.Tensor) -> None:
        segment, mesh = self._trained(row), self.comm.mesh
        assert segment.reduced is not None
        self.gradients.flush()
        segment.arrived.add(segment.rows.index(row))
        whole = segment.whole_gradient()
        with torch.no_grad():
            part = self._part_of(row, value)
            if mesh.size("replicate") > 1:
                # The step will sum over replicas, and divide before that if no reduction has.
                part = part * (self.gradients.before if segment.ranks == 1 else 1.0)
                part *= mesh.rank("replicate") == 0
            segment.view(whole, row).copy_(part)
            if segment.reduced is not whole:
                segment.reduced.copy_(segment.slice_of(whole))
        segment.give_back(whole)
        self.gradients.show_again()

    def moment_names(self, row: Row) -> tuple[str, ...]:
        return tuple(self._states(self._trained(row)))

    def moments(self, row: Row) -> dict[str, torch.Tensor]:
        segment = self._trained(row)
        return {
            key: self._all_of(row, segment.view(self._whole(segment, flat), row))
            for key, flat in self._states(segment).items()
        }

    def set_moment(self, row: Row, key: str, value: torch.Tensor) -> None:
        segment = self._trained(row)
        whole = self._whole(segment, self._states(segment)[key])
        with torch.no_grad():
            segment.view(whole, row).copy_(self._part_of(row, value))
        self._piece(segment).set_moment(key, segment.owned_of(whole))

    def _states(self, segment: TrainedSegment) -> dict[str, torch.Tensor]:
        """Return owned moments with the same keys on every rank. The optimizer of a rank that owns only
        padding has none."""
        mine = self._piece(segment).moments()
        keys = dict.fromkeys(key for keys in self.comm.all_gather_object(list(mine), "data") for key in keys)
        empty = torch.zeros_like(segment.owned, dtype=torch.float32)
        return {key: mine.get(key, empty) for key in keys}

    def _piece(self, segment: FlatSegment) -> FlatShard:
        return FlatShard(segment, self.updater, (0, 1))

    def _of(self, row: Row) -> FlatSegment:
        return self.segments[row.segment]

    def _trained(self, row: Row) -> TrainedSegment:
        segment = self._of(row)
        assert isinstance(segment, TrainedSegment)
        return segment

    def _whole(self, segment: FlatSegment, owned: torch.Tensor) -> torch.Tensor:
        """Gather a copy of a buffer of which each rank holds a slice. Shape [padded]."""
        if owned.numel() == segment.spec.padded:
            return owned.clone()
        whole = owned.new_empty(segment.spec.padded)
        self.comm.all_gather(whole, owned, segment.axis)
        return whole

    def _all_of(self, row: Row, part: torch.Tensor) -> torch.Tensor:
        """Return a copy of the whole parameter, which is gathered if ranks hold different experts."""
        if row.parts == 1:
            return part.clone()
        whole = part.new_empty(row.whole_shape)
        self.comm.all_gather(whole.view(-1), part.reshape(-1), "expert")
        return whole

    def _part_of(self, row: Row, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole value."""
        if row.parts == 1:
            return value
        first = self._of(row).first_of(row)
        return value.reshape(-1)[first : first + row.numel].view(row.shape)
