"""`deepspeed.comm` and `deepspeed.utils.groups`: start torch.distributed, and call its collectives.

A process without a launcher gets a process group of one rank, because scripts ask torch.distributed for their
rank. The engine does not call these collectives. DeepSpeed's arguments `prof`, `log_name` and `debug` have no
effect.

Invariant: a process that a launcher started with others never trains alone.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerodrift.comm import leave_slowly, usable_accelerator
from zerodrift.deepspeed.tools.functions import logger
from zerodrift.errors import MeshError, RankError, first_line

PORT = 29500
TIMEOUT = timedelta(minutes=10)

USUAL = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta = TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed unless it runs. `verbose` and `config` have no effect."""
    if dist.is_initialized():
        return
    if dist_init_required is False:
        must = "must not be false where torch.distributed does not run yet"
        do = "Leave it out, or call `torch.distributed.init_process_group` first."
        raise MeshError("dist_init_required", must, do=do)
    if auto_mpi_discovery and init_method is None:
        _translate(distributed_port)
    leave_slowly()
    device = usable_accelerator() or torch.device("cpu")
    backend = dist_backend or dist.get_default_backend_for_device(device)
    try:
        if init_method is not None or "RANK" in os.environ or rank >= 0:
            dist.init_process_group(
                backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
            )
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, timeout=timeout, rank=0, world_size=1)
    except (RuntimeError, ValueError) as error:
        must, got = f"all ranks must join within {timeout.total_seconds():g} s", repr(first_line(error))
        variables = "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        do = f"Start with `torchrun` or `deepspeed`, which set {variables}."
        raise RankError("init_distributed", must, got=got, do=do) from error


def _translate(port: int) -> None:
    """Set torch's environment variables from those of an MPI launcher, unless torch's are set."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    for names in LAUNCHERS:
        values = [os.environ.get(name) for name in names]
        if values[0] is None or values[1] is None or int(values[1]) == 1:
            continue
        if "MASTER_ADDR" not in os.environ:
            must = f"must name the machine of rank 0 for {names[1]}={values[1]} ranks"
            do = "Pass it through the launcher (`mpirun -x MASTER_ADDR=...`), or start with `torchrun`."
            raise MeshError("MASTER_ADDR", must, got="nothing", do=do)
        os.environ.update({usual: value for usual, value in zip(USUAL, values, strict=True) if value})
        os.environ.setdefault("MASTER_PORT", str(port))
        return


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0)


def local_size() -> int:
    """Return the launcher's number of ranks on this machine."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


# --- groups -----------------------------------------------------------------------------------------------


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Warn that there is no log, and return an empty one."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("`log_summary` has nothing to show: `zerodrift plan` lists every collective of a step")
    return {} if return_dict else None


# --- collectives ------------------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
LOG = ("prof", "log_name", "debug")


def _like(
    name: str, call: Callable[..., Any], arguments: str, log: tuple[str, ...] = LOG, **defaults: Any
) -> Callable[..., Any]:
    """Return torch's function with DeepSpeed's signature: torch's first parameters under DeepSpeed's names,
    then those of DeepSpeed's log, which are ignored. Defaults are torch's unless given."""
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


# torch deprecates `all_gather_into_tensor` and `reduce_scatter_tensor`, the older names of these.
_gather, _scatter = dist.all_gather_single, dist.reduce_scatter_single
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
