"""Carry `fully_shard`'s buffers by zerodrift's own collectives, through torch's public hooks for them.

`set_custom_all_gather`, `set_custom_reduce_scatter` and `set_all_reduce_hook` take objects that are called
with a buffer. So the wire dtype and the dtype of the sum are the plan's, sums are formed in rank order, and
the bits are those of the native engine. A recorder sees every call, and a missing rank is a RankError.
`fully_shard` divides by nothing: the average is taken in the update, once.

Invariant: gradients leave here as exact sums in `reduce.sum`, converted once to the accumulate dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerodrift.comm import Collectives, Recorded, Sum
from zerodrift.policy import Reduction


class GroupCollectives:
    """The collectives of one group, which can be recorded by themselves: torch issues a group's collectives
    when it likes, so a record of all groups does not say whose each is."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self.mesh = comm.mesh
        self._log: list[Recorded] | None = None

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Recorded]]:
        """Yield a list that grows by every collective of this group inside the context."""
        before, self._log = self._log, []
        try:
            yield self._log
        finally:
            self._log = before

    @contextlib.contextmanager
    def issue(self) -> Iterator[Collectives]:
        """Yield the mesh's collectives; what is issued inside is this group's."""
        if self._log is None:
            yield self._comm
            return
        with self._comm.record() as log:
            yield self._comm
        self._log.extend(log)


def _allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device=device)


class AllGather:
    """`torch.distributed.fsdp`'s `AllGather`."""

    allocate = staticmethod(_allocate)

    def __init__(self, collectives: GroupCollectives) -> None:
        self._collectives = collectives

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        with self._collectives.issue() as comm:
            comm.all_gather(output_tensor, input_tensor, "shard")


class ReduceScatter:
    """`torch.distributed.fsdp`'s `ReduceScatter`. Not called where the shard axis has one rank."""

    allocate = staticmethod(_allocate)

    def __init__(self, collectives: GroupCollectives, reduce: Reduction, before: float) -> None:
        self._collectives, self._reduce, self._before = collectives, reduce, before

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise AssertionError(f"fully_shard asks for {op}, although it was set to divide by nothing")
        sum_over_shards(self._collectives, output_tensor, input_tensor, self._reduce, self._before)


def sum_over_shards(
    collectives: GroupCollectives, out: torch.Tensor, full: torch.Tensor, reduce: Reduction, before: float
) -> None:
    """Write this rank's slice of the ranks' sum to `out`. `full` is used up."""
    if before != 1.0:
        full.div_(before)
    how = Sum(reduce.sum.torch, order=reduce.order)
    with collectives.issue() as comm:
        comm.reduce_scatter(out, full.to(reduce.wire.torch), "shard", how)


@torch.no_grad()
def sum_over_replicas(
    collectives: GroupCollectives, flat: torch.Tensor, reduce: Reduction, before: float
) -> None:
    """Sum over replicas, in place, what was summed over shards."""
    if collectives.mesh.size("replicate") == 1:
        return
    if before != 1.0 and collectives.mesh.size("shard") == 1:
        flat.div_(before)
    how = Sum(reduce.sum.torch, order=reduce.order)
    with collectives.issue() as comm:
        comm.all_reduce(flat, flat.to(reduce.wire.torch), "replicate", how)
