"""The updater for a plan: whose algorithm steps which slices, and where they lie.

Invariant: nothing is updated here; what is made keeps the promises of `Updater`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerodrift.optim import admitted, flat, matrices, offload, views
from zerodrift.optim.fused import UpdateFunction, update
from zerodrift.optim.transfers import SideStreams, Transfers
from zerodrift.optim.updater import Owned, Updater
from zerodrift.optimizers import of_type
from zerodrift.plan.table import Plan


def make_updater(
    plan: Plan,
    owned: Sequence[Owned],
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[int, str],
    transfers: Transfers | None = None,
    update_slice: UpdateFunction = update,
) -> Updater:
    """The updater for a plan. `optimizer` is the caller's, over the model's own parameters, whose names
    `names` gives by `id`; without one the plan's `optimizer` block is built. Slices are stepped by
    `update_slice`, the same on all ranks.

    What a plan offloads goes by way of `transfers`: unless told, by streams of the device, and nowhere from a
    CPU, whose memory it is in anyway. Told so, a CPU is treated as if the host were elsewhere.
    """
    device = owned[0].storage.device if owned else torch.device("cpu")
    if not plan.policy.sharding.offload or (transfers is None and device.type == "cpu"):
        return _make(plan, owned, optimizer, names, update_slice)
    sides = transfers or SideStreams(device)
    return offload.Offloaded(owned, lambda held: _make(plan, held, optimizer, names, update_slice), sides)


def _make(
    plan: Plan,
    owned: Sequence[Owned],
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[int, str],
    update_slice: UpdateFunction,
) -> Updater:
    """The updater of pieces where they are."""
    if optimizer is None:
        if plan.policy.optimizer is None:
            raise AssertionError("neither an optimizer nor a recipe for one")
        works_on_matrices = of_type(plan.policy.optimizer.type).matrices
        build = matrices.from_recipe if works_on_matrices else flat.from_recipe
        return build(plan, owned, plan.policy.optimizer, update_slice)
    group_of = views.group_of(optimizer, names, plan)
    ours = flat.algorithm_of(optimizer)
    if ours is not None:
        return flat.FlatUpdater(plan, owned, *ours, optimizer, group_of, update_slice)
    admitted.require(optimizer, group_of, plan, owned[0].storage.device if owned else torch.device("cpu"))
    return views.TorchViews(plan, owned, optimizer, group_of)
