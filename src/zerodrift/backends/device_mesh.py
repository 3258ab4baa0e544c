"""The `DeviceMesh` that DTensors lie on: the same ranks as our mesh, in torch's words.

Our own collectives carry `fully_shard`'s buffers; torch's groups made here serve what a user does with a
DTensor (`full_tensor()`, distributed checkpoints of their own).

Invariant: what is created here is destroyed here, and nothing else.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerodrift.comm.mesh import AxisName, Mesh


class DTensorMesh:
    """The device mesh of an engine, with (replicate, shard) as its dimensions, and (tensor) where parameters
    were DTensors before."""

    def __init__(self, mesh: Mesh) -> None:
        self._alone = not dist.is_initialized()
        if self._alone:
            # fully_shard asks for a process group even where there is nobody to talk to.
            backend = "nccl" if mesh.device.type == "cuda" else "gloo"
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
