"""The shape of the mesh: named axes and their sizes. Pure arithmetic, no process group.

`comm/mesh.py` gives the axes their groups when ranks exist. Ranks are numbered with `shard` fastest, then
`replicate`, then `pipeline`, so that neighbours share a shard group.

Invariant: the axes multiply to the world size.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerodrift.errors import MeshError


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How many ranks each axis has."""

    shard: int = 1
    """Ranks that share one copy of the model."""
    replicate: int = 1
    """Copies of the model that see different data."""
    pipeline: int = 1
    """Pipeline stages."""

    @property
    def world(self) -> int:
        return self.shard * self.replicate * self.pipeline

    @property
    def data(self) -> int:
        """Ranks that see different data: what a gradient is averaged over."""
        return self.shard * self.replicate

    def __str__(self) -> str:
        axes = [("pipeline", self.pipeline), ("replicate", self.replicate), ("shard", self.shard)]
        shown = [f"{name} {size}" for name, size in axes if size > 1]
        return " x ".join(shown) if shown else "1 rank"


def fit(world_size: int, replicate: int, shard: int, pipeline: int) -> MeshShape:
    """The mesh for `world_size` ranks; `replicate` and `shard` may be 0 for "whatever is left"."""
    if world_size < 1:
        raise MeshError(f"`world size`: must be at least 1; got {world_size}.")
    if world_size % pipeline:
        raise MeshError(
            f"`pipeline.stages`: must divide the world size; got {pipeline} stages for {world_size} "
            f"ranks. Use a multiple of {pipeline} ranks."
        )
    data = world_size // pipeline
    for key, size in (("sharding.replicate", replicate), ("zero_optimization.mics_shard_size", shard)):
        if size and data % size:
            divisors = [n for n in range(1, data + 1) if data % n == 0]
            raise MeshError(
                f"`{key}`: must divide the {data} data-parallel ranks; got {size}. "
                f"Possible here: {', '.join(map(str, divisors[:12]))}{', ...' if len(divisors) > 12 else ''}."
            )
    if replicate and shard and replicate * shard != data:
        raise MeshError(
            f"`sharding.replicate`: times `zero_optimization.mics_shard_size` must be the {data} "
            f"data-parallel ranks; got {replicate} x {shard}. Give one of the two."
        )
    if shard:
        return MeshShape(shard=shard, replicate=data // shard, pipeline=pipeline)
    replicate = replicate or 1
    return MeshShape(shard=data // replicate, replicate=replicate, pipeline=pipeline)
