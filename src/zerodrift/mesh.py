"""The shape of the mesh: named axes and their sizes. Pure arithmetic, no process group.

`comm/mesh.py` gives the axes their groups when ranks exist. Ranks are numbered with `shard` fastest, then
`replicate`, then `pipeline`, so that neighbours share a shard group.

Expert parallelism adds no ranks: it folds the shard axis into `expert` x `expert_shard`. Neighbours hold
different experts, and every `expert`-th rank of a shard group holds slices of the same ones.

Tensor parallelism of a user's own (DTensor parameters) is the fastest axis of all: its ranks see the same
data, and each of them has all other axes to itself.

Invariant: the axes multiply to the world size, and `expert` divides `shard`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zerodrift.errors import MeshError


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How many ranks each axis of the mesh has; their product is the world size."""

    shard: int = 1
    """Ranks that share one copy of the model."""
    replicate: int = 1
    """Copies of the model that see different data."""
    pipeline: int = 1
    """Pipeline stages."""
    expert: int = field(default=1, metadata={"omitted": True})
    """Ranks of a shard group that hold different experts; 1 where every rank has all."""
    tensor: int = field(default=1, metadata={"omitted": True})
    """Ranks that the model itself is spread over, where its parameters are DTensors."""

    @property
    def expert_shard(self) -> int:
        """Ranks of a shard group that share the same experts."""
        return self.shard // self.expert

    @property
    def world(self) -> int:
        return self.shard * self.replicate * self.pipeline * self.tensor

    @property
    def data(self) -> int:
        """Ranks that see different data: what a gradient is averaged over."""
        return self.shard * self.replicate

    def __str__(self) -> str:
        axes = [("pipeline", self.pipeline), ("replicate", self.replicate), ("shard", self.shard)]
        axes.append(("tensor", self.tensor))
        shown = [f"{name} {size}" for name, size in axes if size > 1]
        text = " x ".join(shown) if shown else "1 rank"
        return f"{text} (expert {self.expert})" if self.expert > 1 else text


MOST_RANKS = 2**24
"""Hundreds of times the largest machine: more is a mistake."""


def fit(world_size: int, replicate: int, shard: int, pipeline: int, expert: int = 1) -> MeshShape:
    """The mesh for `world_size` ranks; `replicate` and `shard` may be 0 for "whatever is left"."""
    shape = _fit(world_size, replicate, shard, pipeline)
    if shape.shard % expert:
        raise MeshError(
            "experts.ranks",
            f"must divide the {shape.shard} ranks of a shard group",
            got=f"{expert} on a mesh of {shape}",
            do=f"Use a divisor of {shape.shard}, or fewer replicas.",
        )
    return replace(shape, expert=expert)


def require_ranks(world_size: int) -> None:
    """A number of ranks that there may be."""
    is_whole = isinstance(world_size, int) and not isinstance(world_size, bool)
    if not is_whole or not 1 <= world_size <= MOST_RANKS:
        must = f"must be at least 1 and at most {MOST_RANKS:,}, a whole number"
        raise MeshError("world size", must, got=repr(world_size))


def with_tensor_axis(shape: MeshShape, tensor: int) -> MeshShape:
    """The same mesh for each of `tensor` neighbours."""
    return replace(shape, tensor=tensor)


def _fit(world_size: int, replicate: int, shard: int, pipeline: int) -> MeshShape:
    if world_size % pipeline:
        raise MeshError(
            "pipeline.stages",
            "must divide the world size",
            got=f"{pipeline} stages for {world_size} ranks",
            do=f"Use a multiple of {pipeline} ranks.",
        )
    data = world_size // pipeline
    for key, size in (("sharding.replicate", replicate), ("zero_optimization.mics_shard_size", shard)):
        if size and data % size:
            divisors = [n for n in range(1, data + 1) if data % n == 0]
            raise MeshError(
                key,
                f"must divide the {data} data-parallel ranks",
                got=size,
                do=(
                    "Possible here: "
                    f"{', '.join(map(str, divisors[:12]))}{', ...' if len(divisors) > 12 else ''}."
                ),
            )
    if replicate and shard and replicate * shard != data:
        raise MeshError(
            "sharding.replicate",
            f"must multiply with `zero_optimization.mics_shard_size` to {data}, the data-parallel ranks",
            got=f"{replicate} x {shard}",
            do="Give one of the two.",
        )
    if shard:
        return MeshShape(shard=shard, replicate=data // shard, pipeline=pipeline)
    replicate = replicate or 1
    return MeshShape(shard=data // replicate, replicate=replicate, pipeline=pipeline)
