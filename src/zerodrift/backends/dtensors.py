"""DTensors: the `DeviceMesh` that they lie on, and tensor parallelism of the user's own.

Our own collectives carry `fully_shard`'s buffers. torch's groups made here serve what a user does with a
DTensor (`full_tensor()`, distributed checkpoints of their own). `fully_shard` cuts what each rank of the
tensor axis has, so everything else in this backend works on local parts; `DTensorLayout` converts a local
part to the whole parameter and back. A parameter that is the same on every rank of the axis counts on the
first of them.

Invariants: what is created here is destroyed here, and nothing else. `part_of(whole(local)) == local`, bit
for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from zerodrift.comm import AxisName, Mesh
from zerodrift.errors import ModelError, Problems
from zerodrift.model import LAYOUT


class DTensorMesh:
    """The device mesh of an engine, with (replicate, shard) as its dimensions, and (tensor) where parameters
    were DTensors before."""

    def __init__(self, mesh: Mesh) -> None:
        self._alone = not dist.is_initialized()
        if self._alone:
            # fully_shard asks for a process group even where there is nobody to talk to.
            backend = dist.get_default_backend_for_device(mesh.device.type)
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        axes: list[AxisName] = ["replicate", "shard"]
        if mesh.size("tensor") > 1:
            axes.append("tensor")
        sizes = tuple(mesh.size(axis) for axis in axes)
        self.whole: DeviceMesh = init_device_mesh(mesh.device.type, sizes, mesh_dim_names=tuple(axes))
        self.shard: DeviceMesh = self.whole["shard"]

    def stop(self) -> None:
        """Destroy the process groups that this made. Safe to call twice."""
        groups = [] if self.whole is None else self.whole.get_all_groups()
        self.whole = self.shard = None  # type: ignore[assignment]
        if not dist.is_initialized():
            return
        for group in groups:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        if self._alone:
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """The layout of one DTensor of the user's; `shape` and `stride` are the whole parameter's."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def divided(self) -> bool:
        """Whether every rank has another part; otherwise all have the same."""
        return not all(placement.is_replicate() for placement in self.placements)

    def of(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor of which this rank has `local`."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole parameter on every rank; a call of all ranks of the axis."""
        return self.of(local).full_tensor()

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole parameter that every rank has."""
        return distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None).to_local()


def layout_of(parameter: nn.Parameter) -> DTensorLayout | None:
    """Return the layout of a DTensor, or None for a plain parameter."""
    if not isinstance(parameter, DTensor):
        return None
    stride = tuple(parameter.stride())
    return DTensorLayout(parameter.device_mesh, parameter.placements, tuple(parameter.shape), stride)


def local_part(parameter: nn.Parameter) -> nn.Parameter:
    """Return this rank's part as a plain parameter over the same memory."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)


def require_tensor_axis(model: nn.Module, mesh: Mesh) -> None:
    """Refuse DTensors over other ranks than those of the mesh's tensor axis."""
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
