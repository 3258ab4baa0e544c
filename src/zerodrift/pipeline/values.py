"""Read and write whole values of a model that is cut over the ranks of a pipeline: see `engine/values.py`.

Ranks that hold a parameter read and write it as an engine without a pipeline does; the others get the values
by a broadcast.

Invariant: parameters that are tied across the pipeline have the same values at both ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from zerodrift.comm import Collectives, raise_on_all_ranks
from zerodrift.engine import SegmentValues, TrainedSegment, mark_storage_changed
from zerodrift.pipeline.stage_units import StageUnits
from zerodrift.plan import Plan, Row, is_tied_across_ranks, pieces, rank_of


@dataclass(frozen=True, slots=True)
class StagedValues:
    """The whole values of all stages."""

    plan: Plan
    part: Plan
    own: SegmentValues
    comm: Collectives
    units: StageUnits

    @contextlib.contextmanager
    def gathered(self, rows: Mapping[str, Row], write: bool) -> Iterator[dict[str, torch.Tensor]]:
        """Show the values that this rank has."""
        here = {name: mine for name, row in rows.items() if (mine := self._here(row)) is not None}
        with (
            self.own.gathered(here, write) as shown,
            raise_on_all_ranks(self.comm) if write else contextlib.nullcontext(),
        ):
            yield shown
        if write:
            make_equal(self.part, self.own)

    def shape(self, row: Row) -> tuple[int, ...]:
        return row.whole_shape

    def value(self, row: Row) -> torch.Tensor:
        return self._from_owner(row, self.own.value, row.columns.compute.torch)

    def set_value(self, row: Row, value: torch.Tensor) -> None:
        if (mine := self._here(row)) is not None:
            self.own.set_value(mine, value)

    def master(self, row: Row) -> torch.Tensor:
        return self._from_owner(row, self.own.master)

    def set_master(self, row: Row, value: torch.Tensor) -> None:
        if (mine := self._here(row)) is not None:
            self.own.set_master(mine, value)

    def has_gradient(self, row: Row) -> bool:
        mine = self._here(row)
        there = mine is not None and self.own.has_gradient(mine)
        return bool(self.comm.broadcast_object(there, self._home(row), "pipeline"))

    def gradient(self, row: Row, unscale: float) -> torch.Tensor:
        """Return the gradient; for a parameter that is tied across the pipeline, the sum of both ends."""

        def read(mine: Row) -> torch.Tensor:
            return self.own.gradient(mine, unscale)

        whole = self._from_owner(row, read)
        is_tied = is_tied_across_ranks(self.plan, self.plan.segments[row.segment])
        if is_tied and not self.units.are_ends_summed:
            pipeline = self.plan.policy.pipeline
            last = rank_of(pipeline, self.plan.mesh, pieces(pipeline, self.plan.mesh) - 1)
            whole = whole + self._from_owner(row, read, owner=last)
        return whole

    def set_gradient(self, row: Row, value: torch.Tensor) -> None:
        if (mine := self._here(row)) is not None:
            is_whole = self.units.are_ends_summed or self._home(row) == self.comm.mesh.rank("pipeline")
            self.own.set_gradient(mine, value if is_whole else torch.zeros_like(value))

    def moment_names(self, row: Row) -> tuple[str, ...]:
        mine = self._here(row)
        names = () if mine is None else self.own.moment_names(mine)
        return self.comm.broadcast_object(names, self._home(row), "pipeline") or ()

    def moments(self, row: Row) -> dict[str, torch.Tensor]:
        mine = self._here(row)
        held = {} if mine is None else self.own.moments(mine)
        keys = self.comm.broadcast_object(tuple(held), self._home(row), "pipeline") or ()
        # Each lambda is called before the next is made.
        return {key: self._from_owner(row, lambda mine: held[key]) for key in keys}  # noqa: B023

    def set_moment(self, row: Row, key: str, value: torch.Tensor) -> None:
        if (mine := self._here(row)) is not None:
            self.own.set_moment(mine, key, value)

    # --- owners -----------------------------------------------------------------------------------------

    def _here(self, row: Row) -> Row | None:
        """Return this rank's own row, which may have another of its names."""
        return next((mine for name in row.names if (mine := self.part.row(name)) is not None), None)

    def _home(self, row: Row) -> int:
        return rank_of(self.plan.policy.pipeline, self.plan.mesh, self.plan.units[row.unit].stage)

    def _from_owner(
        self,
        row: Row,
        read: Callable[[Row], torch.Tensor],
        dtype: torch.dtype = torch.float32,
        owner: int | None = None,
    ) -> torch.Tensor:
        owner = self._home(row) if owner is None else owner
        mine, mesh = self._here(row), self.comm.mesh
        if mine is not None and owner == mesh.rank("pipeline"):
            value = read(mine).contiguous()
        else:
            value = torch.empty(row.whole_shape, dtype=dtype, device=mesh.device)
        self.comm.broadcast(value, owner, "pipeline")
        return value


def make_equal(part: Plan, own: SegmentValues) -> None:
    """Copy the values of parameters that are tied across the pipeline from its first end to its last."""
    comm, updater = own.comm, own.updater
    for segment in own.segments:
        if not is_tied_across_ranks(part, segment.spec):
            continue
        comm.broadcast(segment.storage, 0, "ends")
        if isinstance(segment, TrainedSegment) and updater is not None:
            master = updater.master(segment.number)
            comm.broadcast(master, 0, "ends")
            if not segment.spec.lead:
                updater.set_master(segment.number, master)
            if segment.shows_narrow_values:
                segment.sync_storage(updater).wait()
        mark_storage_changed(segment)
