"""Adapters between torch and zerodrift: DTensors, their device mesh, and collectives.

`fully_shard` takes custom collectives for its buffers (`set_custom_all_gather`, `set_custom_reduce_scatter`,
`set_all_reduce_hook`), and gets zerodrift's. So the wire dtype and the dtype of the sum are the plan's, sums
are formed in rank order, and the bits are those of the native engine. Collectives can be recorded, and a
missing rank is a RankError. `fully_shard` divides by nothing: the update averages, once.

torch's process groups are for users of a DTensor (`full_tensor()`, their own distributed checkpoints).
`fully_shard` shards the local part that a rank of the tensor axis has, so the rest of this backend works on
local parts. `DTensorLayout` converts a local part to the whole parameter and back. A parameter that is the
same on all ranks of the axis counts on the first one.

Invariants: process groups that are created here are destroyed here. `part_of(whole(local)) == local`, bit for
bit. Gradients are sums in `reduce.sum`, converted once to the accumulate dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from zerodrift.comm import AxisName, Collectives, Mesh, Recorded, Sum
from zerodrift.errors import ModelError, Problems
from zerodrift.model import LAYOUT
from zerodrift.policy import Reduction


class DTensorMesh:
    """The device mesh of an engine, with (replicate, shard) as its dimensions, and (tensor) where parameters
    were DTensors before."""

    def __init__(self, mesh: Mesh) -> None:
        self._alone = not dist.is_initialized()
        if self._alone:
            # fully_shard needs a process group even on one rank.
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
        """Destroy the process groups of the mesh. Safe to call twice."""
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
    """The layout of a user's DTensor; `shape` and `stride` are those of the whole parameter."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def divided(self) -> bool:
        """Whether ranks have different parts; otherwise all have the whole parameter."""
        return not all(placement.is_replicate() for placement in self.placements)

    def of(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor whose local part is `local`."""
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
    """Refuse DTensors over ranks other than those of the mesh's tensor axis."""
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


# --- collectives, through torch's public hooks for them --------------------------------------------------


class GroupCollectives:
    """The collectives of one group, which can be recorded separately: torch interleaves the collectives of
    groups, and a record of all does not show the group of each."""

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm
        self.mesh = comm.mesh
        self._log: list[Recorded] | None = None

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Recorded]]:
        """Yield a list to which every collective of this group inside the context is appended."""
        before, self._log = self._log, []
        try:
            yield self._log
        finally:
            self._log = before

    @contextlib.contextmanager
    def issue(self) -> Iterator[Collectives]:
        """Yield the mesh's collectives, and record those inside the context as this group's."""
        if self._log is None:
            yield self._comm
            return
        with self._comm.record() as log:
            yield self._comm
        self._log.extend(log)


def _allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device=device)


class AllGather:
    """`torch.distributed.fsdp`'s `AllGather`."""

    allocate = staticmethod(_allocate)

    def __init__(self, collectives: GroupCollectives) -> None:
        self._collectives = collectives

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        with self._collectives.issue() as comm:
            comm.all_gather(output_tensor, input_tensor, "shard")


class ReduceScatter:
    """`torch.distributed.fsdp`'s `ReduceScatter`. Not called where the shard axis has one rank."""

    allocate = staticmethod(_allocate)

    def __init__(self, collectives: GroupCollectives, reduce: Reduction, before: float) -> None:
        self._collectives, self._reduce, self._before = collectives, reduce, before

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise AssertionError(f"fully_shard asks for {op}, although it was set to divide by nothing")
        sum_over_shards(self._collectives, output_tensor, input_tensor, self._reduce, self._before)


def sum_over_shards(
    collectives: GroupCollectives, out: torch.Tensor, full: torch.Tensor, reduce: Reduction, before: float
) -> None:
    """Write this rank's slice of the sum over ranks to `out`. `full` is overwritten."""
    if before != 1.0:
        full.div_(before)
    how = Sum(reduce.sum.torch, order=reduce.order)
    with collectives.issue() as comm:
        comm.start_reduce_scatter(out, full.to(reduce.wire.torch), "shard", how, ahead=False).wait()


@torch.no_grad()
def sum_over_replicas(
    collectives: GroupCollectives, flat: torch.Tensor, reduce: Reduction, before: float
) -> None:
    """Sum over replicas, in place, a gradient that was summed over shards."""
    if collectives.mesh.size("replicate") == 1:
        return
    if before != 1.0 and collectives.mesh.size("shard") == 1:
        flat.div_(before)
    how = Sum(reduce.sum.torch, order=reduce.order)
    with collectives.issue() as comm:
        comm.all_reduce(flat, flat.to(reduce.wire.torch), "replicate", how)
