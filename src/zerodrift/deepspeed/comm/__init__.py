"""`deepspeed.comm`: torch.distributed under DeepSpeed's names, for a script's own collectives.

The engine does not come through here: its collectives are those of the plan. Arguments of DeepSpeed's that
only feed its log of collectives (`prof`, `log_name`, `debug`) are accepted and mean nothing.

Invariant: what a call leaves is what torch.distributed's call of the same name leaves.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (
    ReduceOp,
    all_gather_object,
    all_to_all,
    broadcast_object_list,
    destroy_process_group,
    is_available,
    is_initialized,
    new_group,
)

from zerodrift.deepspeed import absent
from zerodrift.deepspeed.launch import init_distributed, local_rank

Group = dist.ProcessGroup | None
Tensor = torch.Tensor

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

# torch 2.13 has other names for these, and warns of the old ones.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ABSENT = absent.absent("deepspeed.comm", absent.COMM)


def __getattr__(name: str) -> Any:
    return absent.missing(__name__, name, __all__, _ABSENT)


# --- who is there ---------------------------------------------------------------------------------------


def get_world_group() -> Any:
    return dist.group.WORLD


def get_world_size(group: Group = None) -> int:
    return dist.get_world_size(group)


def get_rank(group: Group = None) -> int:
    return dist.get_rank(group)


def get_local_rank() -> int:
    return local_rank()


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    return dist.get_process_group_ranks(group)


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_gather_into_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return False


def has_coalescing_manager() -> bool:
    return False


# --- collectives ----------------------------------------------------------------------------------------


def broadcast(
    tensor: Tensor,
    src: int,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: Any = None,
) -> Any:
    return dist.broadcast(tensor, src, group=group, async_op=async_op)


def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Any:
    return dist.all_reduce(tensor, op, group=group, async_op=async_op)


def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: Any = None,
) -> Any:
    return dist.reduce(tensor, dst, op, group=group, async_op=async_op)


def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: Any = None,
) -> Any:
    return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)


def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: Any = None,
) -> Any:
    return _gather_single(output_tensor, tensor, group=group, async_op=async_op)


def allgather_fn(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    debug: Any = None,
) -> Any:
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: Any = None,
) -> Any:
    return dist.reduce_scatter(output, input_list, op, group=group, async_op=async_op)


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: Any = None,
) -> Any:
    return _reduce_scatter_single(output_tensor, tensor, op, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)


def all_to_all_single(  # DeepSpeed's nine parameters
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: Any = None,
) -> Any:
    return dist.all_to_all_single(
        output, tensor, output_split_sizes, input_split_sizes, group=group, async_op=async_op
    )


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: Any = None,
) -> Any:
    return dist.gather(tensor, gather_list, dst, group=group, async_op=async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: Any = None,
) -> Any:
    return dist.scatter(tensor, scatter_list, src, group=group, async_op=async_op)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: Any = None,
) -> Any:
    return dist.barrier(group=group, async_op=async_op, device_ids=device_ids)


def monitored_barrier(
    group: Group = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: Any = None,
) -> None:
    dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)


# --- one to one -----------------------------------------------------------------------------------------


def send(
    tensor: Tensor,
    dst: int,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "send",
    debug: Any = None,
) -> None:
    dist.send(tensor, dst, group=group, tag=tag)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "recv",
    debug: Any = None,
) -> int:
    return dist.recv(tensor, src, group=group, tag=tag)


def isend(
    tensor: Tensor,
    dst: int,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "isend",
    debug: Any = None,
) -> Any:
    return dist.isend(tensor, dst, group=group, tag=tag)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: Any = None,
) -> Any:
    return dist.irecv(tensor, src, group=group, tag=tag)
