"""The collectives of one group: the engine's, and a list of the group's own for whoever wants to know.

torch issues a group's collectives when it likes, so a list of all of them does not say whose each is.

Invariant: whatever a group sends goes through its `GroupCollectives`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zerodrift.comm.collectives import Collectives, Recorded
from zerodrift.comm.fold import Sum
from zerodrift.comm.mesh import AxisName, Mesh


class GroupCollectives:
    """What one group sends."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self._log: list[Recorded] | None = None

    @property
    def mesh(self) -> Mesh:
        return self._comm.mesh

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Recorded]]:
        """A list that grows by every collective of this group inside the `with`."""
        before, self._log = self._log, []
        try:
            yield self._log
        finally:
            self._log = before

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, axis: AxisName) -> None:
        with self._noted():
            self._comm.all_gather(out, shard, axis)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, axis: AxisName, how: Sum) -> None:
        with self._noted():
            self._comm.reduce_scatter(out, full, axis, how)

    def all_reduce(self, out: torch.Tensor, values: torch.Tensor, axis: AxisName, how: Sum) -> None:
        with self._noted():
            self._comm.all_reduce(out, values, axis, how)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        if self._log is None:
            yield
            return
        with self._comm.record() as log:
            yield
        self._log.extend(log)
