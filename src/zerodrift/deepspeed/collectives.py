"""`deepspeed.comm` and `deepspeed.utils.groups`: torch.distributed under DeepSpeed's names, for a script's
own use.

The engine does not call these functions. DeepSpeed's extra arguments `prof`, `log_name` and `debug` are
accepted and ignored.

Invariant: each collective leaves the same values as torch.distributed's of the same name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zerodrift.deepspeed.log import logger


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_model_parallel_rank() -> int:
    return 0


def get_model_parallel_world_size() -> int:
    return 1


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


has_reduce_scatter_tensor = has_all_gather_into_tensor = _yes
has_all_reduce_coalesced = has_coalescing_manager = _no


# --- the log of collectives -------------------------------------------------------------------------------


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Do nothing: there is no log."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Warn that there is no log, and return an empty one."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("`log_summary` has nothing to show: `zerodrift plan` lists every collective of a step")
    return {} if return_dict else None


def reset_log() -> None:
    """Do nothing: there is no log."""


# --- collectives ------------------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
LOG = ("prof", "log_name", "debug")


def _like(
    name: str, call: Callable[..., Any], arguments: str, log: tuple[str, ...] = LOG, **defaults: Any
) -> Callable[..., Any]:
    """Return torch's function with DeepSpeed's signature: torch's first parameters under DeepSpeed's names,
    then those of its log. Defaults are torch's unless given."""
    theirs = inspect.signature(call).parameters.values()
    renamed = [
        parameter.replace(name=new, default=defaults.get(new, parameter.default))
        for new, parameter in zip(arguments.split(), theirs, strict=False)
    ]
    for_log = [
        inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for key, default in {"prof": False, "log_name": name, "debug": None}.items()
        if key in log
    ]
    signature = inspect.Signature([*renamed, *for_log])

    def collective(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return call(*bound.args[: len(renamed)])

    collective.__name__ = collective.__qualname__ = name
    collective.__doc__ = f"`torch.distributed.{call.__name__}`."
    collective.__signature__ = signature  # type: ignore[attr-defined]
    return collective


# torch 2.13 renamed these two, and warns about the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_split = "output tensor output_split_sizes input_split_sizes group async_op"

broadcast = _like("broadcast", dist.broadcast, "tensor src group async_op", src=REQUIRED)
all_reduce = _like("all_reduce", dist.all_reduce, "tensor op group async_op")
reduce = _like("reduce", dist.reduce, "tensor dst op group async_op", dst=REQUIRED)
all_gather = _like("all_gather", dist.all_gather, "tensor_list tensor group async_op")
all_gather_into_tensor = _like("all_gather_into_tensor", _gather, "output_tensor tensor group async_op")
allgather_fn = _like("allgather_fn", _gather, "output_tensor input_tensor group async_op", ("debug",))
reduce_scatter = _like("reduce_scatter", dist.reduce_scatter, "output input_list op group async_op")
reduce_scatter_tensor = _like("reduce_scatter_tensor", _scatter, "output_tensor tensor op group async_op")
reduce_scatter_fn = _like("reduce_scatter_fn", _scatter, "output_tensor tensor op group async_op", LOG[::2])
all_to_all_single = _like("all_to_all_single", dist.all_to_all_single, _split)
gather = _like("gather", dist.gather, "tensor gather_list dst group async_op", dst=0)
scatter = _like("scatter", dist.scatter, "tensor scatter_list src group async_op", src=0)
barrier = _like("barrier", dist.barrier, "group async_op device_ids")
monitored_barrier = _like("monitored_barrier", dist.monitored_barrier, "group timeout wait_all_ranks")
send = _like("send", dist.send, "tensor dst group tag", dst=REQUIRED)
recv = _like("recv", dist.recv, "tensor src group tag")
isend = _like("isend", dist.isend, "tensor dst group tag", dst=REQUIRED)
irecv = _like("irecv", dist.irecv, "tensor src group tag")
