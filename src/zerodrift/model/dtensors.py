"""Parameters that are DTensors, from a tensor-parallel plan of the user.

A `ParameterSpec` of such a model has the shape of the local shard. All ranks must have the same shape, so a
sharded dimension must divide evenly.

Invariant: torch's DTensors are not imported for a model that has none.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from zerodrift.errors import ModelError, Problems

if TYPE_CHECKING:
    import torch
    from torch import nn

LAYOUT = (
    'Use `init_device_mesh(device, (data, tensor), mesh_dim_names=("dp", "tp"))["tp"]`, whose ranks are '
    "neighbours."
)


def is_dtensor(tensor: object) -> bool:
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the local shard of a DTensor, or the shape of any other tensor."""
    part: Any = tensor
    return tuple(part.to_local().shape if is_dtensor(tensor) else tensor.shape)


def ranks(module: nn.Module) -> int:
    """Return the number of ranks that share each DTensor of a model; 1 for a model without DTensors."""
    problems = Problems()
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        tensor: Any = parameter
        if not is_dtensor(tensor):
            continue
        mesh = tensor.device_mesh
        must = got = ""
        if mesh.ndim != 1 or not mesh.mesh_dim_names:
            must, got = "must be a DTensor over a mesh of one named dimension", f"one over {mesh}"
            do = LAYOUT
        elif type(placement := tensor.placements[0]).__name__ not in ("Replicate", "Shard"):
            must, got = "must be divided or whole on each rank", f"a DTensor that is {placement}"
            do = "Call `parallelize_module` before `initialize`, and leave `fully_shard` to it."
        elif not placement.is_replicate() and tensor.shape[placement.dim] % mesh.size():
            must = f"must be divided evenly over {mesh.size()} ranks"
            got = f"{tensor.shape[placement.dim]} along dimension {placement.dim}"
            do = "Pad it, or leave it whole."
        if must:
            problems.add(name, must, got=got, do=do)
        else:
            first.setdefault(mesh.size(), name)
    if len(first) > 1:
        listed = " and ".join(f"{size} ranks for `{name}`" for size, name in first.items())
        problems.add("model", "must have all its DTensors on one mesh", got=listed, do=LAYOUT)
    problems.raise_as(ModelError)
    return next(iter(first), 1)
