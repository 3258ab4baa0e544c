"""`deepspeed.comm`: torch.distributed under DeepSpeed's names, for a script's own collectives.

The engine does not come through here: its collectives are those of the plan. A collective takes torch's
arguments under DeepSpeed's names, then those that only feed DeepSpeed's log of collectives (`prof`,
`log_name`, `debug`), which are accepted and mean nothing.

Invariant: what a call leaves is what torch.distributed's call of the same name leaves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

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

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.launch import init_distributed, local_rank
from zerodrift.deepspeed.utils.logging import logger

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
    "configure",
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
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
]

__getattr__ = unsupported.lookup(__name__)


# --- who is there ---------------------------------------------------------------------------------------

get_rank = dist.get_rank
get_world_size = dist.get_world_size
get_local_rank = local_rank
get_all_ranks_from_group = dist.get_process_group_ranks


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_gather_into_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return False


def has_coalescing_manager() -> bool:
    return False


# --- the log of collectives -------------------------------------------------------------------------------


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Nothing: there is no log."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Says what lists a step's collectives. There is no log, so nothing is in it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("`log_summary` has nothing to show: `zerodrift plan` lists every collective of a step")
    return {} if return_dict else None


def reset_log() -> None:
    """Nothing: there is no log."""


# --- collectives ----------------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
LOG = ("prof", "log_name", "debug")


def _like(
    name: str, call: Callable[..., Any], arguments: str, log: tuple[str, ...] = LOG, **defaults: Any
) -> Callable[..., Any]:
    """torch's function with DeepSpeed's signature: torch's first parameters under DeepSpeed's names, with
    torch's defaults unless others are given, then those of DeepSpeed's log."""
    theirs = inspect.signature(call).parameters.values()
    renamed = [
        parameter.replace(name=new, default=defaults.get(new, parameter.default))
        for new, parameter in zip(arguments.split(), theirs, strict=False)
    ]
    of_log = [
        inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for key, default in {"prof": False, "log_name": name, "debug": None}.items()
        if key in log
    ]
    signature = inspect.Signature([*renamed, *of_log])

    def collective(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return call(*bound.args[: len(renamed)])

    collective.__name__ = collective.__qualname__ = name
    collective.__doc__ = f"`torch.distributed.{call.__name__}`."
    collective.__signature__ = signature  # type: ignore[attr-defined]
    return collective


# torch 2.13 has other names for these, and warns of the old ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

broadcast = _like("broadcast", dist.broadcast, "tensor src group async_op", src=REQUIRED)
all_reduce = _like("all_reduce", dist.all_reduce, "tensor op group async_op")
reduce = _like("reduce", dist.reduce, "tensor dst op group async_op", dst=REQUIRED)
all_gather = _like("all_gather", dist.all_gather, "tensor_list tensor group async_op")
all_gather_into_tensor = _like("all_gather_into_tensor", _gather, "output_tensor tensor group async_op")
allgather_fn = _like("allgather_fn", _gather, "output_tensor input_tensor group async_op", ("debug",))
reduce_scatter = _like("reduce_scatter", dist.reduce_scatter, "output input_list op group async_op")
reduce_scatter_tensor = _like("reduce_scatter_tensor", _scatter, "output_tensor tensor op group async_op")
reduce_scatter_fn = _like(
    "reduce_scatter_fn", _scatter, "output_tensor tensor op group async_op", ("prof", "debug")
)
all_to_all_single = _like(
    "all_to_all_single",
    dist.all_to_all_single,
    "output tensor output_split_sizes input_split_sizes group async_op",
)
gather = _like("gather", dist.gather, "tensor gather_list dst group async_op", dst=0)
scatter = _like("scatter", dist.scatter, "tensor scatter_list src group async_op", src=0)
barrier = _like("barrier", dist.barrier, "group async_op device_ids")
monitored_barrier = _like("monitored_barrier", dist.monitored_barrier, "group timeout wait_all_ranks")
send = _like("send", dist.send, "tensor dst group tag", dst=REQUIRED)
recv = _like("recv", dist.recv, "tensor src group tag")
isend = _like("isend", dist.isend, "tensor dst group tag", dst=REQUIRED)
irecv = _like("irecv", dist.irecv, "tensor src group tag")
