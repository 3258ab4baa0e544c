"""Shape of the mesh: named axes and their sizes.

`comm/mesh.py` gives the axes their process groups. Rank numbers count `tensor` fastest, then `shard`,
`replicate` and `pipeline`, so that neighbours share a shard group.

Expert parallelism adds no ranks. It folds the shard axis into `expert` x `expert_shard`: neighbours hold
different experts, and every `expert`-th rank of a shard group holds slices of the same ones. Ranks of
`tensor` see the same data.

Invariant: the axes multiply to the world size, and `expert` and `secondary` divide `shard`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zerodrift.errors import MeshError


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Ranks of each axis of the mesh. Their product is the world size."""

    shard: int = 1
    """Ranks that share one copy of the model."""
    replicate: int = 1
    """Copies of the model that see different data."""
    pipeline: int = 1
    """Pipeline stages."""
    expert: int = field(default=1, metadata={"omitted": True})
    """Ranks of a shard group that hold different experts. 1 if every rank has all experts."""
    tensor: int = field(default=1, metadata={"omitted": True})
    """Ranks over which DTensors are spread, for tensor parallelism."""
    secondary: int = field(default=1, metadata={"omitted": True})
    """Neighbours of a shard group that share a second copy of the blocks. 1 if there is none."""

    @property
    def expert_shard(self) -> int:
        """Ranks of a shard group that share the same experts."""
        return self.shard // self.expert

    @property
    def expert_secondary(self) -> int:
        """Ranks with the same experts that share a second copy of them. 1 if there is none."""
        return self.secondary // self.expert if self.secondary % self.expert == 0 else 1

    @property
    def world(self) -> int:
        return self.shard * self.replicate * self.pipeline * self.tensor

    @property
    def data(self) -> int:
        """Ranks that see different data. Gradients are averaged over them."""
        return self.shard * self.replicate

    def size(self, axis: str) -> int:
        """Return the ranks of an axis by its name."""
        return int(getattr(self, axis))

    def __str__(self) -> str:
        axes = [("pipeline", self.pipeline), ("replicate", self.replicate), ("shard", self.shard)]
        axes.append(("tensor", self.tensor))
        shown = [f"{name} {size}" for name, size in axes if size > 1]
        text = " x ".join(shown) if shown else "1 rank"
        return f"{text} (expert {self.expert})" if self.expert > 1 else text


MOST_RANKS = 2**24
"""Limit that catches mistakes."""


def fit(world_size: int, replicate: int, shard: int, pipeline: int, expert: int = 1) -> MeshShape:
    """Fit a mesh to `world_size` ranks. 0 for `replicate` or `shard` means all ranks that are left."""
    if world_size % pipeline:
        got, do = f"{pipeline} stages for {world_size} ranks", f"Use a multiple of {pipeline} ranks."
        raise MeshError("pipeline.stages", "must divide the world size", got=got, do=do)
    data = world_size // pipeline
    for key, size in (("sharding.replicate", replicate), ("zero_optimization.mics_shard_size", shard)):
        if size and data % size:
            divisors = [str(n) for n in range(1, data + 1) if data % n == 0]
            do = f"Possible here: {', '.join(divisors[:12])}{', ...' if len(divisors) > 12 else ''}."
            raise MeshError(key, f"must divide the {data} data-parallel ranks", got=size, do=do)
    if replicate and shard and replicate * shard != data:
        must = f"must multiply with `zero_optimization.mics_shard_size` to {data}, the data-parallel ranks"
        raise MeshError("sharding.replicate", must, got=f"{replicate} x {shard}", do="Give one of the two.")
    copies = data // shard if shard else replicate or 1
    shape = MeshShape(shard=data // copies, replicate=copies, pipeline=pipeline)
    if shape.shard % expert:
        must = f"must divide the {shape.shard} ranks of a shard group"
        do = f"Use a divisor of {shape.shard}, or fewer replicas."
        raise MeshError("experts.ranks", must, got=f"{expert} on a mesh of {shape}", do=do)
    return replace(shape, expert=expert)


def require_ranks(world_size: int) -> None:
    """Raise MeshError unless the number of ranks is possible."""
    is_whole = isinstance(world_size, int) and not isinstance(world_size, bool)
    if not is_whole or not 1 <= world_size <= MOST_RANKS:
        must = f"must be at least 1 and at most {MOST_RANKS:,}, a whole number"
        raise MeshError("world size", must, got=repr(world_size))


def with_secondary(shape: MeshShape, key: str, ranks: int) -> MeshShape:
    """Return the mesh with a second copy of the blocks on so many neighbours of a shard group."""
    if ranks < shape.shard and shape.shard % ranks:
        must = f"must divide the {shape.shard} ranks of a shard group"
        do = "Use the number of ranks of a node, or leave it out."
        raise MeshError(key, must, got=f"{ranks} on a mesh of {shape}", do=do)
    return replace(shape, secondary=ranks if ranks < shape.shard else 1)
