"""Machines as a file describes them, and how long a collective takes on them.

A file is read like a config: every key is known and typed. The files in `clusters` are examples to copy and
change. Collectives use the algorithms of `comm/collectives.py`: a ring for an all-gather, and for a reduction
slices from every rank to every rank, recursive halving, or NCCL's own. On gloo all ranks exchange messages in
pairs.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from zerodrift import config
from zerodrift.comm import DIRECT, travels_by_halves
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, nearest
from zerodrift.mesh import MeshShape
from zerodrift.plan import Collective, Plan

Share = Annotated[float, Field(gt=0, le=1, strict=True)]
FOLDER = Path(__file__).with_name("clusters")
MICRO, GIGA, TERA = 1e-6, 1e9, 1e12


class Products(config.Block):
    """TFLOP/s of dense products, by the dtype that is computed in."""

    fp32: config.PositiveFloat
    """Products of fp32 operands, or of TF32 if torch is set to use it."""
    bf16: config.PositiveFloat | None = None
    """Products of bf16 operands. Required for a plan that computes in bf16."""
    fp16: config.PositiveFloat | None = None
    """Products of fp16 operands. Required for a plan that computes in fp16."""
    fp8: config.PositiveFloat | None = None
    """Products of fp8 operands. Required for a plan with `compute: fp8`."""


class Device(config.Block):
    """The device of one rank."""

    tflops: Products
    """Peak throughput, as the maker states it or measured."""
    tflops_reached: Share = 1.0
    """Share of the peak that products of a usual size reach."""
    memory_gb: config.PositiveFloat
    """GB (10^9 bytes) that a rank may fill."""
    memory_gb_per_s: config.PositiveFloat
    """GB/s between memory and processor, reads and writes together."""
    memory_reached: Share = 1.0
    """Share of `memory_gb_per_s` that operations reach."""
    new_gb_per_s: config.PositiveFloat | None = None
    """GB/s at which the system provides new memory. Default: none is new, as an allocator keeps freed
    memory."""
    cache_mb: config.NonNegativeFloat = 0.0
    """Operations that read and write fewer MB than this run at the speed of a cache."""
    cache_gb_per_s: config.PositiveFloat | None = None
    """GB/s of the cache. Default: the speed of memory."""
    operation_us: config.NonNegativeFloat = 0.0
    """Least microseconds of an operation."""


class Link(config.Block):
    """A link between devices."""

    gb_per_s: config.PositiveFloat
    """GB/s that one device sends while it receives as much."""
    reached: Share = 1.0
    """Share of `gb_per_s` that collectives reach."""
    latency_us: config.NonNegativeFloat = 0.0
    """Microseconds of one round of messages."""
    message_us: config.NonNegativeFloat = 0.0
    """Microseconds of each message, beside those of its bytes, when every rank sends one to every other."""

    @property
    def bytes_per_second(self) -> float:
        return self.gb_per_s * self.reached * GIGA

    def seconds(self, size: float, rounds: int = 1) -> float:
        """Return the seconds in which one device sends `size` bytes in so many rounds of messages."""
        return size / self.bytes_per_second + rounds * self.latency_us * MICRO


class Cluster(config.Block):
    """The machines of a run."""

    device: Device
    """The device of one rank."""
    devices_per_host: config.Positive
    """Devices that `host` links. Neighbouring ranks share a host."""
    cores: config.Positive | None = None
    """Cores of a host whose ranks compute and communicate on them. All other figures are of a rank that has
    its cores to itself. Default: every rank has its own cores."""
    threads: config.Positive = 1
    """Cores that a rank keeps busy. Only with `cores`."""
    host: Link
    """Link inside a host."""
    network: Link | None = None
    """Link between hosts. Without it there is one host."""
    carrier: Literal["native", "pairs"] = "native"
    """Carrier of collectives: `native` for NCCL, `pairs` for gloo."""
    compute_beside_link: Share = 1.0
    """Speed of computing during a collective, as a share of the speed without one."""
    reserve_gb: config.NonNegativeFloat = 0.0
    """GB of each device that the plan and activations cannot use: memory of libraries, and fragmentation."""
    source: str = ""
    """Origin of the figures."""

    def peak(self, dtype: DType) -> float:
        """Stated FLOP/s."""
        word = str(dtype).partition("_")[0]
        stated: float | None = getattr(self.device.tflops, word, None)
        if stated is None:
            must = f"must be given, because the plan computes in {word}"
            do = "Add it to the cluster's file, in TFLOP/s."
            raise ConfigError(f"device.tflops.{word}", must, got="nothing", do=do)
        return stated * TERA

    def shared_by(self, ranks: int) -> Cluster:
        """Return the cluster with the speed of one rank while so many ranks run. Ranks that need more cores
        than a host has share their time."""
        busy = min(ranks, self.devices_per_host) * self.threads
        if self.cores is None or busy <= self.cores:
            return self
        share = self.cores / busy
        parts = {"device": _slowed(self.device, share), "host": _slowed(self.host, share)}
        return self.model_copy(update=parts)

    def seconds_of_bytes(self, count: float) -> float:
        """Return the seconds of an operation that reads and writes `count` bytes in all."""
        device = self.device
        if device.cache_gb_per_s is not None and count < device.cache_mb * 1e6:
            return count / (device.cache_gb_per_s * GIGA)
        return count / (device.memory_gb_per_s * device.memory_reached * GIGA)


_RATES = frozenset(("tflops_reached", "memory_reached", "new_gb_per_s", "cache_gb_per_s", "reached"))
_TIMES = frozenset(("operation_us", "latency_us", "message_us"))


def _slowed(block: Device | Link, share: float) -> Device | Link:
    """Return a device or a link at a share of its speed."""
    values = {key: value * share for key, value in block if key in _RATES and value is not None}
    values |= {key: value / share for key, value in block if key in _TIMES}
    return block.model_copy(update=values)


def built_in() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_cluster(source: str | os.PathLike[str]) -> tuple[Cluster, Path]:
    """Read a file, or a built-in cluster by its name; return its path too."""
    text = os.fsdecode(source)
    path = FOLDER / f"{text}.yaml" if text in built_in() else Path(text).expanduser()
    if not path.exists():
        meant = "".join(f"Did you mean `{name}`? " for name in nearest(text, built_in()))
        must = f"must be the file of a cluster, or one of {', '.join(built_in())}"
        do = f"{meant}Copy one of those from {FOLDER} and change it."
        raise ConfigError("--simulate", must, got=repr(text), do=do)
    heading, tree, problems = config.tree_of(path, "cluster")
    used = config.TreeReader(KEYS, problems).select_used(tree)
    problems.raise_as(ConfigError, heading)
    return Cluster.model_validate(used), path


KEYS = config.Keys("cluster", Cluster, "a cluster", "See docs/simulate.md.")


@dataclass(frozen=True, slots=True)
class AxisLayout:
    """How the ranks of a mesh axis lie on hosts."""

    ranks: int
    stride: int  # distance between neighbours of the axis, in ranks

    def on_host(self, cluster: Cluster) -> int:
        """Return the number of ranks on the host that has fewest of them, whose ranks send most to others."""
        whole = max(1, cluster.devices_per_host // self.stride)
        return self.ranks % whole or whole


def axis_layout(mesh: MeshShape, axis: str) -> AxisLayout:
    shard = mesh.tensor * mesh.shard
    stage, experts = shard * mesh.replicate, mesh.tensor * mesh.expert
    strides = {"expert_shard": experts, "expert_secondary": experts, "replicate": shard, "pipeline": stage}
    if axis == "ends":
        return AxisLayout(2, stage * max(1, mesh.pipeline - 1))
    return AxisLayout(getattr(mesh, axis), strides.get(axis, mesh.tensor))


def collective_time(call: Collective, plan: Plan, cluster: Cluster) -> tuple[float, int]:
    """Return the seconds of a collective on a free link, and the bytes that a rank then reads and writes to
    add up the received values."""
    layout, size = axis_layout(plan.mesh, call.axis), call.dtype.nbytes(call.numel)
    gather = _ring if cluster.carrier == "native" else all_to_all_seconds
    if layout.ranks == 1:
        return 0.0, 0
    if call.op == "all_gather":
        return gather(size, layout, cluster), 0
    if call.op == "reduce_scatter":
        return _reduce_scatter(call, size, layout, plan, cluster)
    if call.dtype is DType.INT64 and (cluster.carrier == "native" or layout.ranks > 4):
        return _ring(2 * size, layout, cluster), 0
    if size <= DIRECT or layout.ranks == 2 or call.numel % layout.ranks:
        everything = size * layout.ranks
        return all_to_all_seconds(everything, layout, cluster), everything + size
    seconds, added = _reduce_scatter(call, size, layout, plan, cluster)
    return seconds + gather(size, layout, cluster), added


def _reduce_scatter(
    call: Collective, size: int, layout: AxisLayout, plan: Plan, cluster: Cluster
) -> tuple[float, int]:
    total, ranks = call.sum or call.dtype, layout.ranks
    update = plan.segments[call.segment].columns.update if call.segment >= 0 else None
    order = update.reduce.order if update is not None else "rank"
    is_exact = order == "tree" and total is call.dtype
    if is_exact and travels_by_halves(ranks, size, cluster.carrier):
        seconds, distance, part, added = 0.0, 1, size // 2, 0
        whole = cluster.devices_per_host // layout.stride or 1
        while distance < ranks:
            inside = ranks <= whole or whole % (2 * distance) == 0  # for every pair that exchanges halves
            seconds += (cluster.host if inside else _network(cluster)).seconds(part)
            added += 3 * part
            distance, part = 2 * distance, part // 2
        return seconds, added
    mine = size // ranks
    if order == "native" and cluster.carrier == "native" and total is call.dtype:
        return _ring(size, layout, cluster), 3 * mine
    added = size + 2 * (call.numel // ranks) * total.size
    if order == "tree" and cluster.carrier == "native":
        added = 3 * (size - mine)  # each addition reads two sums and writes one
    return all_to_all_seconds(size, layout, cluster), added


def _ring(size: int, layout: AxisLayout, cluster: Cluster) -> float:
    """Return the seconds of a ring over all ranks. Each rank of a host has a network card of its own."""
    near = layout.on_host(cluster)
    rounds = math.ceil(math.log2(layout.ranks))
    sent = size * (layout.ranks - 1) / layout.ranks
    if near == layout.ranks:
        return cluster.host.seconds(sent, rounds)
    network = _network(cluster)
    speed = network.bytes_per_second
    speed = min(cluster.host.bytes_per_second, near * speed) if near > 1 else speed
    return sent / speed + rounds * network.latency_us * MICRO


def all_to_all_seconds(size: int, layout: AxisLayout, cluster: Cluster) -> float:
    """Return the seconds in which every rank sends a slice of `size` to every other rank."""
    near, part = layout.on_host(cluster), size / layout.ranks

    def seconds(link: Link, ranks: int) -> float:
        return part * ranks / link.bytes_per_second + link.message_us * MICRO * ranks

    inside = seconds(cluster.host, near - 1)
    if near == layout.ranks:
        return inside + cluster.host.latency_us * MICRO
    network = _network(cluster)
    return max(inside, seconds(network, layout.ranks - near)) + network.latency_us * MICRO


def message_seconds(size: int, layout: AxisLayout, cluster: Cluster) -> float:
    return (cluster.host if layout.on_host(cluster) > 1 else _network(cluster)).seconds(size)


def _network(cluster: Cluster) -> Link:
    if cluster.network is None:
        raise ConfigError("network", "must be given for ranks on several hosts", got="nothing")
    return cluster.network
