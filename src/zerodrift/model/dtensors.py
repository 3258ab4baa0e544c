"""Parameters that are DTensors, from a tensor-parallel plan of the user.

A `ParameterSpec` of such a model has the shape of the local shard. All ranks must have the same shape, so a
sharded dimension must divide evenly.

Invariant: torch's DTensors are not imported for a model that has none.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from zerodrift.errors import ModelError, Problem, Problems

if TYPE_CHECKING:
    import torch
    from torch import nn

LAYOUT = (
    'Use `init_device_mesh(device, (data, tensor), mesh_dim_names=("dp", "tp"))["tp"]`, whose ranks are '
    "neighbours."
)


def is_dtensor(tensor: object) -> bool:
    """Return True if the object is a DTensor."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the local shard of a DTensor, or the shape of any other tensor."""
    part: Any = tensor
    return tuple(part.to_local().shape if is_dtensor(tensor) else tensor.shape)


def ranks(module: nn.Module) -> int:
    """Return the number of ranks that share each DTensor of a model; 1 for a model without DTensors."""
    problems = Problems()
    sizes: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        tensor: Any = parameter
        if not is_dtensor(tensor):
            continue
        problem = _problem(name, tensor)
        if problem is None:
            sizes.setdefault(tensor.device_mesh.size(), name)
        else:
            problems.include(problem)
    if len(sizes) > 1:
        listed = " and ".join(f"{size} ranks for `{name}`" for size, name in sizes.items())
        problems.add("model", "must have all its DTensors on one mesh", got=listed, do=LAYOUT)
    problems.raise_as(ModelError)
    return next(iter(sizes), 1)


def _problem(name: str, tensor: Any) -> Problem | None:
    """Return the reason why a DTensor cannot be trained, or None."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1 or not mesh.mesh_dim_names:
        must = "must be a DTensor over a mesh of one named dimension"
        return Problem(name, must, got=f"one over {mesh}", do=LAYOUT)
    (placement,) = placements
    if placement.is_replicate():
        return None
    if type(placement).__name__ != "Shard":
        must = "must be divided or whole on each rank"
        return Problem(name, must, got=f"a DTensor that is {placement}", do=_BEFORE)
    if tensor.shape[placement.dim] % mesh.size():
        must = f"must be divided evenly over {mesh.size()} ranks"
        got = f"{tensor.shape[placement.dim]} along dimension {placement.dim}"
        return Problem(name, must, got=got, do="Pad it, or leave it whole.")
    return None


_BEFORE = "Call `parallelize_module` before `initialize`, and leave `fully_shard` to it."
