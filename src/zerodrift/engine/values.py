"""Whole values of parameters that lie in segments, out and in: see `parameter.py`.

What comes out is a copy, but for `gathered`, which shows the parameters themselves.

Invariant: reading changes nothing; writing goes to the master, and what is visible follows from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.attached import READ, WRITE, AttachedParameters, settle
from zerodrift.engine.grads import Gradients
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.trained import TrainedSegment
from zerodrift.errors import ModelError, Problems
from zerodrift.optim.updater import Updater
from zerodrift.plan.table import Row


@dataclass(frozen=True, slots=True)
class SegmentValues:
    """The whole values of one rank's segments."""

    segments: Sequence[FlatSegment]
    updater: Updater | None
    gradients: Gradients
    attached: AttachedParameters
    comm: Collectives

    @contextlib.contextmanager
    def gathered(self, rows: Mapping[str, Row], write: bool) -> Iterator[dict[str, torch.Tensor]]:
        """With `write`, where any rank raises inside, nobody's values change. Of experts that are spread over
        ranks, these are a rank's own, and the first rank's that has the same."""
        segments = {row.segment: self._of(row) for row in rows.values()}
        self._settle(segments.values(), cure=write)
        kept = {number for number, segment in segments.items() if segment.is_full}
        with self._lent(segments, kept):
            shown = {name: self._of(row).view(self._of(row).full, row) for name, row in rows.items()}
            if write:
                with self._writing(segments.values(), list(rows.values())):
                    yield shown
                return
            yield shown
            self._require_unwritten(segments.values())

    @contextlib.contextmanager
    def _lent(self, segments: dict[int, FlatSegment], kept: set[int]) -> Iterator[None]:
        for segment in segments.values():
            segment.start_gather()
        for segment in segments.values():
            segment.lend()
        try:
            yield
        finally:
            for number, segment in segments.items():
                segment.take_back(keep=number in kept)

    def _require_unwritten(self, segments: Iterable[FlatSegment]) -> None:
        attached, problems = self.attached, Problems()
        for segment in segments:
            if attached.is_open(segment):
                continue
            for row in segment.written_while_lent():
                segment.drop_writes()
                problems.add(row.name, WRITE, got=READ, do=_LOST)
        problems.raise_as(ModelError)

    @contextlib.contextmanager
    def _writing(self, segments: Iterable[FlatSegment], rows: list[Row]) -> Iterator[None]:
        """What is written inside is taken over where the outermost context ends, if no rank has raised."""
        attached = self.attached
        segments = list(segments)
        outermost = not attached.opened
        before = [] if outermost else [(segment, segment.full.clone()) for segment in segments]
        attached.open(segments, rows)
        try:
            with raise_on_all_ranks(self.comm, "data"):
                yield
        except BaseException:
            attached.put_back(segments)
            with torch.no_grad():
                for segment, full in before:
                    segment.full.copy_(full)
            if outermost:
                self._end_writing(commit=False)
            raise
        attached.take_over(segments)
        if outermost:
            self._end_writing(commit=True)

    def _end_writing(self, *, commit: bool) -> None:
        held = self.attached.close()
        try:
            if commit:
                for segment, rows in held:
                    self._write_back(segment, rows)
        finally:
            for segment, _ in held:
                segment.drop_writes()
                segment.take_back()
        if commit:
            for segment, _ in held:
                segment.renew()

    def _write_back(self, segment: FlatSegment, rows: list[Row]) -> None:
        """The rows as they stand on rank 0 into master and storage. An element that was not changed keeps
        every bit; a row that was loaded or assigned is taken as it stands."""
        whole = self._whole_master(segment)
        with torch.no_grad():
            for row in rows:
                shown = segment.view(segment.full, row).clone()
                if row.parts == 1:
                    self.comm.broadcast(shown.view(-1), 0, "data")
                else:  # of the first rank that has the same experts
                    self.comm.broadcast(shown.view(-1), 0, segment.axis)
                    self.comm.broadcast(shown.view(-1), 0, "replicate")
                place = segment.view(whole, row)
                kept = segment.at_rest(place).to(shown.dtype) == shown
                if row.name in self.attached.replaced:
                    kept.fill_(False)
                if kept.all():
                    continue
                place.copy_(torch.where(kept, place, shown.to(place.dtype)))
        self._set_whole_master(segment, whole)

    def _settle(self, segments: Iterable[FlatSegment], *, cure: bool = False) -> None:
        """Take over what was written to storage by others than the engine, or raise; a call of all ranks.
        With `cure`, what cannot be told apart is taken as it stands: somebody is about to say what holds."""
        apart = [segment for segment in segments if segment.apart]
        if apart:
            with raise_on_all_ranks(self.comm, "data"):
                for segment in apart:
                    settle(segment, self.updater, cure=cure)

    # --- values and masters -----------------------------------------------------------------------------

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
        self.attached.require_closed(f"engine.parameter({row.name!r}).master")
        segment = self._of(row)
        whole = self._whole_master(segment)
        with torch.no_grad():
            segment.view(whole, row).copy_(self._part_of(row, value))
        segment.drop()
        self._set_whole_master(segment, whole)
        segment.renew()

    def _whole_master(self, segment: FlatSegment) -> torch.Tensor:
        self._settle([segment])
        return self._whole(segment, self._owned_master(segment))

    def _owned_master(self, segment: FlatSegment) -> torch.Tensor:
        """A copy in fp32 of what this rank holds: storage, where there is no master."""
        if not isinstance(segment, TrainedSegment) or self.updater is None:
            return segment.storage.to(torch.float32, copy=True)
        return self.updater.master(segment.number)

    def _set_whole_master(self, segment: FlatSegment, whole: torch.Tensor) -> None:
        with torch.no_grad():
            if not isinstance(segment, TrainedSegment) or self.updater is None:
                segment.storage.copy_(segment.slice_of(whole) if segment.sharded else whole)
                segment.changed()
                return
            self.updater.set_master(segment.number, segment.owned_of(whole))
        segment.sync_storage().wait()
        segment.changed()

    # --- gradients --------------------------------------------------------------------------------------

    def has_gradient(self, row: Row) -> bool:
        self.gradients.flush()
        self.gradients.show_again()
        return self._trained(row).reduced is not None

    def gradient(self, row: Row, unscale: float) -> torch.Tensor:
        segment = self._trained(row)
        whole = segment.whole_gradient()
        summed = segment.over_replicas(whole, self.gradients.before)
        gradient = segment.view(summed, row).float() * unscale
        segment.give_back(whole)
        return self._all_of(row, gradient)

    def set_gradient(self, row: Row, value: torch.Tensor) -> None:
        segment, mesh = self._trained(row), self.comm.mesh
        if segment.reduced is None:
            raise AssertionError(f"{row.name} has no gradient")
        self.gradients.flush()
        segment.arrived.add(segment.rows.index(row))
        whole = segment.whole_gradient()
        with torch.no_grad():
            part = self._part_of(row, value)
            if mesh.size("replicate") > 1:
                # The step has yet to sum over replicas, and to divide before it where no reduction did.
                part = part * (self.gradients.before if segment.ranks == 1 else 1.0)
                part *= mesh.rank("replicate") == 0
            segment.view(whole, row).copy_(part)
            if segment.reduced is not whole:
                segment.reduced.copy_(segment.slice_of(whole))
        segment.give_back(whole)
        self.gradients.show_again()

    # --- moments ----------------------------------------------------------------------------------------

    def moment_names(self, row: Row) -> tuple[str, ...]:
        return tuple(self._states(self._trained(row)))

    def moments(self, row: Row) -> dict[str, torch.Tensor]:
        segment = self._trained(row)
        flats = self._states(segment)
        return {
            key: self._all_of(row, segment.view(self._whole(segment, flat), row))
            for key, flat in flats.items()
        }

    def set_moment(self, row: Row, key: str, value: torch.Tensor) -> None:
        segment = self._trained(row)
        if self.updater is None:
            raise AssertionError("no optimizer")
        whole = self._whole(segment, self._states(segment)[key])
        with torch.no_grad():
            segment.view(whole, row).copy_(self._part_of(row, value))
        self.updater.set_state(segment.number, key, segment.owned_of(whole))

    def _states(self, segment: TrainedSegment) -> dict[str, torch.Tensor]:
        """Owned moments with the same keys on every rank: one that owns padding only has none itself."""
        if self.updater is None:
            return {}
        mine = self.updater.states(segment.number)
        keys = dict.fromkeys(key for keys in self.comm.all_gather_object(list(mine), "data") for key in keys)
        empty = torch.zeros_like(segment.owned, dtype=torch.float32)
        return {key: mine.get(key, empty) for key in keys}

    # --- rows -------------------------------------------------------------------------------------------

    def _of(self, row: Row) -> FlatSegment:
        return self.segments[row.segment]

    def _trained(self, row: Row) -> TrainedSegment:
        segment = self._of(row)
        if not isinstance(segment, TrainedSegment):
            raise AssertionError(f"{row.name} is frozen")
        return segment

    def _whole(self, segment: FlatSegment, owned: torch.Tensor) -> torch.Tensor:
        """`[padded]` of what each rank holds a slice of, as a copy."""
        if owned.numel() == segment.spec.padded:
            return owned.clone()
        whole = owned.new_empty(segment.spec.padded)
        self.comm.all_gather(whole, owned, segment.axis)
        return whole

    def _all_of(self, row: Row, part: torch.Tensor) -> torch.Tensor:
        """The whole parameter, as a copy: a stack of experts from all ranks that have some of them."""
        if row.parts == 1:
            return part.clone()
        whole = part.new_empty(row.whole_shape)
        self.comm.all_gather(whole.view(-1), part.reshape(-1), "expert")
        return whole

    def _part_of(self, row: Row, value: torch.Tensor) -> torch.Tensor:
        """What this rank has of a whole value."""
        if row.parts == 1:
            return value
        first = self._of(row).first_of(row)
        return value.reshape(-1)[first : first + row.numel].view(row.shape)


_LOST = "Nobody else would have seen it, and it is dropped."
