"""Parameters that are DTensors before `fully_shard` cuts them: tensor parallelism of the user's own.

`fully_shard` cuts what each rank of the tensor axis has, so everything else here works on local parts; this
is the way from a local part to the whole parameter and back. What is the same on every rank of the axis
counts on the first of them.

Invariant: `mine(whole(local)) == local`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from zerodrift.comm.mesh import Mesh
from zerodrift.errors import ModelError, Problems
from zerodrift.model.dtensors import LAYOUT


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """How one parameter is spread."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    """Of the whole parameter."""
    stride: tuple[int, ...]

    @property
    def divided(self) -> bool:
        """Whether every rank has another part; otherwise all have the same."""
        return not all(placement.is_replicate() for placement in self.placements)

    def of(self, local: torch.Tensor) -> DTensor:
        """The DTensor of which this rank has `local`."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """The whole parameter, on every rank; a call of all ranks of the axis."""
        return self.of(local).full_tensor()

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole parameter that every rank has."""
        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None).to_local()


def layout_of(parameter: nn.Parameter) -> DTensorLayout | None:
    """None for a plain parameter."""
    if not isinstance(parameter, DTensor):
        return None
    stride = tuple(parameter.stride())
    return DTensorLayout(parameter.device_mesh, parameter.placements, tuple(parameter.shape), stride)


def local_part(parameter: nn.Parameter) -> nn.Parameter:
    """What this rank has, as a plain parameter over the same memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)


def require_neighbours(model: nn.Module, mesh: Mesh) -> None:
    """The ranks of every DTensor must be those of the mesh's tensor axis."""
    problems = Problems()
    wanted = list(mesh.axis("tensor").ranks)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        ranks = parameter.device_mesh.mesh.tolist()
        if ranks != wanted:
            problems.add(
                name, f"must be a DTensor over ranks {wanted} here", got=f"one over {ranks}", do=LAYOUT
            )
        elif parameter.is_meta:
            must = "must hold values, being a DTensor"
            problems.add(name, must, got="one on the meta device", do="Build it on a device.")
    problems.raise_as(ModelError)
