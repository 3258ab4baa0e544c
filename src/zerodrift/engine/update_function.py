"""One way to update for all ranks, decided before the first step.

On a GPU the programs in Triton and the definition in PyTorch may differ by an ulp ([Note: bits on a GPU] in
`optim/fused.py`). Ranks that hold the same weights and update them in different ways would drift apart,
without a word. So programs run on every rank or on none. On a CPU, and for what is offloaded to one, nothing
has to be agreed: with a compiler or without, a rank leaves the same bits, and says so itself where it has
none.

Invariant: all ranks get the same answer.
"""

from __future__ import annotations

import logging

from zerodrift.comm.collectives import Collectives
from zerodrift.kernels import device
from zerodrift.optim.fused import UpdateFunction, update
from zerodrift.optim.updates import reference_update
from zerodrift.plan.table import Plan

_log = logging.getLogger("zerodrift")


def choose_update_function(plan: Plan, comm: Collectives) -> UpdateFunction:
    """How every rank steps its slices. Every rank asks."""
    where = comm.mesh.device
    if where.type == "cpu" or plan.policy.sharding.offload:
        return update
    return agree_on_update_function(comm, device.obstacle(where))


def agree_on_update_function(comm: Collectives, obstacle: str | None) -> UpdateFunction:
    """The programs, if no rank has an obstacle; else the definition on all, after one notice for all."""
    obstacles = comm.all_gather_object(obstacle)
    without = {rank: why for rank, why in enumerate(obstacles) if why is not None}
    if not without:
        return update
    if comm.mesh.rank() == 0:
        _log.warning(
            "zerodrift: %s, on rank %s of %d; updates run in plain PyTorch everywhere, several times slower",
            "; ".join(dict.fromkeys(without.values())),
            ", ".join(str(rank) for rank in without),
            len(obstacles),
        )
    return reference_update
