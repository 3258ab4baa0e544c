"""Build the updater of a plan: which algorithm steps the shards of this rank, and in which memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerodrift.optim import flat, torch_optimizer
from zerodrift.optim.elementwise import require_elementwise
from zerodrift.optim.fused import UpdateFunction, update
from zerodrift.optim.offload import OffloadedUpdater, SideStreams, Transfers
from zerodrift.optim.updater import Owned, Updater
from zerodrift.plan import Plan


def make_updater(
    plan: Plan,
    owned: Sequence[Owned],
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[int, str],
    transfers: Transfers | None = None,
    update_slice: UpdateFunction = update,
) -> Updater:
    """Return the updater of the shards that this rank owns.

    `optimizer` is the caller's, over the model's own parameters, and `names` gives their names by `id`.
    Without one the plan's `optimizer` block is built. `update_slice` is the same on all ranks.

    If the plan offloads, `transfers` copies between device and host. It defaults to streams of the device,
    and to nothing for a CPU; a CPU with `transfers` is treated as if the host were elsewhere.
    """

    def make(owned: Sequence[Owned]) -> Updater:
        """Return the updater of shards in the memory in which they are."""
        if optimizer is None:
            return flat.from_recipe(plan, owned, update_slice)
        group_of = torch_optimizer.group_of(optimizer, names, plan)
        known = flat.algorithm_of(optimizer)
        if known is not None:
            return flat.FlatUpdater(plan, owned, *known, optimizer, group_of, update_slice)
        require_elementwise(optimizer, group_of, plan)
        return torch_optimizer.TorchOptimizerUpdater(plan, owned, optimizer, group_of)

    device = owned[0].storage.device if owned else torch.device("cpu")
    if not plan.policy.sharding.offload or (transfers is None and device.type == "cpu"):
        return make(owned)
    return OffloadedUpdater(owned, make, transfers or SideStreams(device))
