"""`init_distributed`: join the ranks that a launcher started.

`deepspeed`, `torchrun` and `accelerate launch` set the same variables. Those of MPI launchers are copied to
the usual ones, as DeepSpeed does. A process without a launcher gets a process group of one rank, because
scripts ask torch.distributed for their rank.

Invariant: a process that a launcher started with others never trains alone.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zerodrift.comm.mesh import leave_slowly
from zerodrift.errors import MeshError, RankError, first_line

PORT = 29500
TIMEOUT = timedelta(minutes=10)

USUAL = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)
"""The variables of MPI launchers, in the same order."""


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
    """Start torch.distributed unless it runs. `verbose` and `config` change nothing."""
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise MeshError(
            "dist_init_required",
            "must not be false where torch.distributed does not run yet",
            do="Leave it out, or call `torch.distributed.init_process_group` first.",
        )
    if auto_mpi_discovery and init_method is None:
        _translate(distributed_port)
    leave_slowly()
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    try:
        if init_method is not None or "RANK" in os.environ or rank >= 0:
            dist.init_process_group(
                backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
            )
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, timeout=timeout, rank=0, world_size=1)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            "init_distributed",
            f"all ranks must join within {timeout.total_seconds():g} s",
            got=repr(first_line(error)),
            do=(
                "Start with `torchrun` or `deepspeed`, which set RANK, WORLD_SIZE, LOCAL_RANK, "
                "MASTER_ADDR and MASTER_PORT."
            ),
        ) from error


def _translate(port: int) -> None:
    """Copy the variables of an MPI launcher to torch's, unless torch's are set."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    for names in LAUNCHERS:
        values = [os.environ.get(name) for name in names]
        if values[0] is None or values[1] is None or int(values[1]) == 1:
            continue
        if "MASTER_ADDR" not in os.environ:
            raise MeshError(
                "MASTER_ADDR",
                f"must name the machine of rank 0 for {names[1]}={values[1]} ranks",
                got="nothing",
                do="Pass it through the launcher (`mpirun -x MASTER_ADDR=...`), or start with `torchrun`.",
            )
        os.environ.update({usual: value for usual, value in zip(USUAL, values, strict=True) if value})
        os.environ.setdefault("MASTER_PORT", str(port))
        return


def local_rank() -> int:
    """Return this process's rank on its machine, 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0)
