"""Parameters that are DTensors: a tensor-parallel plan of the user's own.

Such a model is described as one rank has it: the shape of a parameter is that of its local part. Ranks must
have the same, so what is divided must be divided evenly.

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
    """Whether this is a DTensor."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of what one rank has."""
    part: Any = tensor
    return tuple(part.to_local().shape if is_dtensor(tensor) else tensor.shape)


def ranks(module: nn.Module) -> int:
    """How many ranks each DTensor of a model is spread over; 1 where there are none."""
    problems = Problems()
    sizes: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter):
            problem = _problem(name, parameter)
            if problem is not None:
                problems.include(problem)
                continue
            held: Any = parameter
            sizes.setdefault(held.device_mesh.size(), name)
    if len(sizes) > 1:
        listed = " and ".join(f"{size} ranks for `{name}`" for size, name in sizes.items())
        problems.add("model", "must have all its DTensors on one mesh", got=listed, do=LAYOUT)
    problems.raise_as(ModelError)
    return next(iter(sizes), 1)


def _problem(name: str, tensor: Any) -> Problem | None:
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
