"""What carries `fully_shard`'s buffers: zerodrift's own collectives, through torch's public places for them.

`set_custom_all_gather`, `set_custom_reduce_scatter` and `set_all_reduce_hook` take objects that are called
with a buffer. So the wire dtype and the dtype of the sum are the plan's, sums are formed in rank order, and
the bits are those of the native engine; a recorder sees every call; a rank that is missing is a RankError.

`fully_shard` is told to divide by nothing: the average is taken in the update, once.

Invariant: gradients leave here as exact sums in `reduce.sum`, converted once to the accumulate dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerodrift.backends.group_collectives import GroupCollectives
from zerodrift.comm.fold import Sum
from zerodrift.policy.nouns import Reduction


class AllGather:
    """`torch.distributed.fsdp`'s `AllGather`."""

    def __init__(self, collectives: GroupCollectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._collectives.all_gather(output_tensor, input_tensor, "shard")


class ReduceScatter:
    """`torch.distributed.fsdp`'s `ReduceScatter`. Not called where the shard axis has one rank."""

    def __init__(self, collectives: GroupCollectives, reduce: Reduction, before: float) -> None:
        self._collectives, self._reduce, self._before = collectives, reduce, before

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise AssertionError(f"fully_shard asks for {op}, and was told to divide by nothing")
        over_shards(self._collectives, output_tensor, input_tensor, self._reduce, self._before)


def over_shards(
    collectives: GroupCollectives, out: torch.Tensor, full: torch.Tensor, reduce: Reduction, before: float
) -> None:
    """This rank's slice of the ranks' sum. `full` is used up."""
    if before != 1.0:
        full.div_(before)
    how = Sum(reduce.sum.torch, order=reduce.order)
    collectives.reduce_scatter(out, full.to(reduce.wire.torch), "shard", how)


@torch.no_grad()
def over_replicas(
    collectives: GroupCollectives, flat: torch.Tensor, reduce: Reduction, before: float
) -> None:
    """The sum over replicas of what was summed over shards, in place."""
    if collectives.mesh.size("replicate") == 1:
        return
    if before != 1.0 and collectives.mesh.size("shard") == 1:
        flat.div_(before)
    how = Sum(reduce.sum.torch, order=reduce.order)
    collectives.all_reduce(flat, flat.to(reduce.wire.torch), "replicate", how)


def all_reduce_hook(
    collectives: GroupCollectives, reduce: Reduction, before: float, wanted: Callable[[], bool]
) -> Callable[[torch.Tensor], None]:
    """For `set_all_reduce_hook`: sums over replicas during the backward, where that is `wanted`."""

    def sum_over_replicas(reduced: torch.Tensor) -> None:
        if wanted():
            over_replicas(collectives, reduced, reduce, before)

    return sum_over_replicas
