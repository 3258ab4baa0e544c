"""Full values out of an engine and back in: parameters, gradients, masters, moments.

For people, tests and checkpoints; no step goes through here. All calls are collective: every rank asks for
the same names in the same order. What comes out is a copy, but for `gathered`, which shows the parameters
themselves.

Invariant: reading changes nothing; writing goes to the master, and what is visible follows from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.attached import settle
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.trained import TrainedSegment
from zerodrift.errors import ModelError, Problems, UnsupportedError, did_you_mean
from zerodrift.plan.table import Row

if TYPE_CHECKING:
    from zerodrift.engine.engine import Engine


class Values:
    """Access to the full values of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextlib.contextmanager
    def gathered(
        self, names: Iterable[str] | None = None, write: bool = False
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters by name, full, in their compute dtype, as they are now: what is kept stays so. With
        `write`, rank 0's values at the end of the context become everybody's, masters included; where any
        rank raises inside, nobody's change. Of experts that are spread over ranks, these are a rank's own,
        and the first rank's that has the same."""
        rows = {name: self._row(name) for name in (self._all_names() if names is None else names)}
        segments = {segment.number: segment for segment, _ in rows.values()}
        self.settle(segments.values(), cure=write)
        kept = {number for number, segment in segments.items() if segment.is_full}
        with self._lent(segments, kept):
            shown = {name: segment.view(segment.full, row) for name, (segment, row) in rows.items()}
            if write:
                with self._writing(segments.values(), [row for _, row in rows.values()]):
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
        attached, problems = self._engine.attached, Problems()
        for segment in segments:
            if attached.is_open(segment):
                continue
            for row in segment.written_while_lent():
                segment.drop_writes()
                problems.add(
                    row.name, "must be written inside `engine.gathered(write=True)`", got=_READ, do=_LOST
                )
        problems.raise_as(ModelError)

    @contextlib.contextmanager
    def _writing(self, segments: Iterable[FlatSegment], rows: list[Row]) -> Iterator[None]:
        """What is written inside is taken over where the outermost context ends, if no rank has raised."""
        attached = self._engine.attached
        segments = list(segments)
        outermost = not attached.opened
        before = [] if outermost else [(segment, segment.full.clone()) for segment in segments]
        attached.open(segments, rows)
        try:
            with raise_on_all_ranks(self._engine.comm, "data"):
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
        held = self._engine.attached.close()
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
                    self._engine.comm.broadcast(shown.view(-1), 0, "data")
                else:  # of the first rank that has the same experts
                    self._engine.comm.broadcast(shown.view(-1), 0, segment.axis)
                    self._engine.comm.broadcast(shown.view(-1), 0, "replicate")
                place = segment.view(whole, row)
                kept = segment.at_rest(place).to(shown.dtype) == shown
                if row.name in self._engine.attached.replaced:
                    kept.fill_(False)
                if kept.all():
                    continue
                place.copy_(torch.where(kept, place, shown.to(place.dtype)))
        self._set_whole_master(segment, whole)

    def settle(self, segments: Iterable[FlatSegment], *, cure: bool = False) -> None:
        """Take over what was written to storage by others than the engine, or raise; a call of all ranks.
        With `cure`, what cannot be told apart is taken as it stands: somebody is about to say what holds."""
        found = [segment for segment in segments if segment.apart]
        if found:
            with raise_on_all_ranks(self._engine.comm, "data"):
                for segment in found:
                    settle(segment, self._engine.updater, cure=cure)

    # --- masters ----------------------------------------------------------------------------------------

    def master(self, name: str) -> torch.Tensor:
        segment, row = self._row(name)
        return self._all_of(row, segment.view(self._whole_master(segment), row))

    def set_master(self, name: str, value: torch.Tensor) -> None:
        self._engine.attached.require_closed("set_full_master")
        segment, row = self._row(name)
        whole = self._whole_master(segment)
        with torch.no_grad():
            segment.view(whole, row).copy_(self._part_of(segment, row, value))
        segment.drop()
        self._set_whole_master(segment, whole)
        segment.renew()

    def _whole_master(self, segment: FlatSegment) -> torch.Tensor:
        self.settle([segment])
        return self._whole(segment, self._owned_master(segment))

    def _owned_master(self, segment: FlatSegment) -> torch.Tensor:
        """A copy in fp32 of what this rank holds: storage, where there is no master."""
        updater = self._engine.updater
        if not isinstance(segment, TrainedSegment) or updater is None:
            return segment.storage.to(torch.float32, copy=True)
        return updater.master(segment.number)

    def _set_whole_master(self, segment: FlatSegment, whole: torch.Tensor) -> None:
        updater = self._engine.updater
        with torch.no_grad():
            if not isinstance(segment, TrainedSegment) or updater is None:
                segment.storage.copy_(segment.slice_of(whole) if segment.sharded else whole)
                segment.changed()
                return
            updater.set_master(segment.number, segment.owned_of(whole))
        segment.sync_storage().wait()
        segment.changed()

    # --- gradients --------------------------------------------------------------------------------------

    def gradient(self, name: str) -> torch.Tensor:
        segment, row = self._trained_row(name)
        self._engine.gradients.flush()
        if segment.reduced is None:
            return torch.zeros(row.whole_shape, device=segment.storage.device)
        whole = segment.whole_gradient()
        summed = segment.over_replicas(whole, self._engine.gradients.before)
        found = segment.view(summed, row).float() * self._engine.progress.unscale
        segment.give_back(whole)
        return self._all_of(row, found)

    def set_gradient(self, name: str, value: torch.Tensor) -> None:
        segment, row = self._trained_row(name)
        self._engine.gradients.flush()
        if segment.reduced is None:
            raise UnsupportedError(
                name,
                "must have a gradient to replace",
                got="none in this step",
                do="Call it after `engine.backward` and before `engine.step`.",
            )
        whole = segment.whole_gradient()
        with torch.no_grad():
            part = self._part_of(segment, row, value) / self._engine.progress.unscale
            mesh = self._engine.mesh
            if mesh.size("replicate") > 1:
                # The step has yet to sum over replicas, and to divide before it where no reduction did.
                part *= self._engine.gradients.before if segment.ranks == 1 else 1.0
                part *= mesh.rank("replicate") == 0
            segment.view(whole, row).copy_(part)
            if segment.reduced is not whole:
                segment.reduced.copy_(segment.slice_of(whole))
        segment.give_back(whole)

    # --- moments ----------------------------------------------------------------------------------------

    def state(self, name: str) -> dict[str, torch.Tensor]:
        segment, row = self._trained_row(name)
        flats = self._states(segment)
        return {
            key: self._all_of(row, segment.view(self._whole(segment, flat), row))
            for key, flat in flats.items()
        }

    def set_state(self, name: str, key: str, value: torch.Tensor) -> None:
        segment, row = self._trained_row(name)
        updater, flats = self._engine.updater, self._states(segment)
        if updater is None or key not in flats:
            raise ModelError(
                name,
                f"must have optimizer state {key!r}",
                got=", ".join(flats) or "none yet",
                do="State is there after the first step.",
            )
        whole = self._whole(segment, flats[key])
        with torch.no_grad():
            segment.view(whole, row).copy_(self._part_of(segment, row, value))
        updater.set_state(segment.number, key, segment.owned_of(whole))

    def _states(self, segment: FlatSegment) -> dict[str, torch.Tensor]:
        """Owned moments with the same keys on every rank: one that owns padding only has none itself."""
        updater = self._engine.updater
        if updater is None:
            return {}
        mine = updater.states(segment.number)
        keys = dict.fromkeys(
            key for keys in self._engine.comm.all_gather_object(list(mine), "data") for key in keys
        )
        empty = torch.zeros_like(segment.owned, dtype=torch.float32)
        return {key: mine.get(key, empty) for key in keys}

    # --- rows -------------------------------------------------------------------------------------------

    def _whole(self, segment: FlatSegment, owned: torch.Tensor) -> torch.Tensor:
        """`[padded]` of what each rank holds a slice of, as a copy."""
        if owned.numel() == segment.spec.padded:
            return owned.clone()
        whole = owned.new_empty(segment.spec.padded)
        self._engine.comm.all_gather(whole, owned, segment.axis)
        return whole

    def _all_of(self, row: Row, part: torch.Tensor) -> torch.Tensor:
        """The whole parameter, as a copy: a stack of experts from all ranks that have some of them."""
        if row.parts == 1:
            return part.clone()
        whole = part.new_empty(row.whole_shape)
        self._engine.comm.all_gather(whole.view(-1), part.reshape(-1), "expert")
        return whole

    @staticmethod
    def _part_of(segment: FlatSegment, row: Row, value: torch.Tensor) -> torch.Tensor:
        """What this rank has of a whole value."""
        if row.parts == 1:
            return value
        first = segment.first_of(row)
        return value.reshape(-1)[first : first + row.numel].view(row.shape)

    def _all_names(self) -> list[str]:
        return [row.name for row in self._engine.part.rows]

    def _row(self, name: str) -> tuple[FlatSegment, Row]:
        row = self._engine.part.row(name)
        if row is None:
            known = [name for row in self._engine.part.rows for name in row.names]
            todo = did_you_mean(name, known)
            raise ModelError(name, "must be a parameter of the model", got="no such name", do=todo)
        return self._engine.segments[row.segment], row

    def _trained_row(self, name: str) -> tuple[TrainedSegment, Row]:
        segment, row = self._row(name)
        if not isinstance(segment, TrainedSegment):
            raise ModelError(name, "must be trained", got="a frozen parameter")
        return segment, row


_READ = "a write inside `engine.gathered()`, which shows values"
_LOST = "Nobody else would have seen it, and it is dropped."
