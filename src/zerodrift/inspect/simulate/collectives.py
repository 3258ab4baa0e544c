"""How long a collective takes: what stays inside a host, what crosses the network.

The algorithm is the engine's (`comm/collectives.py`): a ring for a gather; for a sum slices from every rank
to every rank, recursive halving, or NCCL's own. On gloo everything goes as messages between pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerodrift.comm.collectives import DIRECT, HALVING
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError
from zerodrift.inspect.simulate.cluster import GIGA, MICRO, Cluster, Link
from zerodrift.mesh import MeshShape
from zerodrift.plan.schedule import Collective
from zerodrift.plan.table import Plan


@dataclass(frozen=True, slots=True)
class AxisLayout:
    """How the ranks of a mesh axis lie on hosts."""

    ranks: int
    stride: int
    """Distance between neighbours of the axis, in ranks."""

    def on_host(self, cluster: Cluster) -> int:
        return max(1, min(self.ranks, cluster.devices_per_host // self.stride))


def axis_layout(mesh: MeshShape, axis: str) -> AxisLayout:
    shard = mesh.tensor * mesh.shard
    return {
        "shard": AxisLayout(mesh.shard, mesh.tensor),
        "expert": AxisLayout(mesh.expert, mesh.tensor),
        "expert_shard": AxisLayout(mesh.expert_shard, mesh.tensor * mesh.expert),
        "replicate": AxisLayout(mesh.replicate, shard),
        "pipeline": AxisLayout(mesh.pipeline, shard * mesh.replicate),
        "ends": AxisLayout(2, shard * mesh.replicate * max(1, mesh.pipeline - 1)),
    }[axis]


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    seconds: float
    """Time on a free link, from the beginning."""
    added: int
    """Bytes that a rank reads and writes to add up what arrived, once it waits."""


def collective_time(call: Collective, plan: Plan, cluster: Cluster) -> CollectiveTime:
    layout, size = axis_layout(plan.mesh, call.axis), call.numel * call.dtype.size
    if layout.ranks == 1:
        return CollectiveTime(0.0, 0)
    if call.op == "all_gather":
        return CollectiveTime(_gather(size, layout, cluster), 0)
    if call.op == "reduce_scatter":
        return _reduce_scatter(call, size, layout, plan, cluster)
    if call.dtype is DType.INT64 and (cluster.carrier == "native" or layout.ranks > 4):
        return CollectiveTime(_ring(2 * size, layout, cluster), 0)
    if size <= DIRECT or layout.ranks == 2 or call.numel % layout.ranks:
        everything = size * layout.ranks
        return CollectiveTime(all_to_all_seconds(everything, layout, cluster), everything + size)
    reduced = _reduce_scatter(call, size, layout, plan, cluster)
    return CollectiveTime(reduced.seconds + _gather(size, layout, cluster), reduced.added)


def _reduce_scatter(
    call: Collective, size: int, layout: AxisLayout, plan: Plan, cluster: Cluster
) -> CollectiveTime:
    total, ranks = call.sum or call.dtype, layout.ranks
    update = plan.segments[call.segment].columns.update if call.segment >= 0 else None
    order = update.reduce.order if update is not None else "rank"
    power_of_two = not ranks & (ranks - 1)
    if order == "tree" and total is call.dtype and power_of_two and ranks >= HALVING[cluster.carrier]:
        seconds, distance, part, added = 0.0, 1, size // 2, 0
        while distance < ranks:
            inside = distance < layout.on_host(cluster)
            seconds += _transfer(part, cluster.host if inside else _network(cluster))
            added += 3 * part
            distance, part = 2 * distance, part // 2
        return CollectiveTime(seconds, added)
    mine = size // ranks
    if order == "native" and cluster.carrier == "native" and total is call.dtype:
        return CollectiveTime(_ring(size, layout, cluster), 3 * mine)
    added = size + 2 * mine * total.size // call.dtype.size
    return CollectiveTime(all_to_all_seconds(size, layout, cluster), added)


def _gather(size: int, layout: AxisLayout, cluster: Cluster) -> float:
    algorithm = _ring if cluster.carrier == "native" else all_to_all_seconds
    return algorithm(size, layout, cluster)


def _ring(size: int, layout: AxisLayout, cluster: Cluster) -> float:
    """Seconds of a ring over all ranks. The ranks of one host send over their own cards at once."""
    near = layout.on_host(cluster)
    rounds = math.ceil(math.log2(layout.ranks))
    sent = size * (layout.ranks - 1) / layout.ranks
    inside = _speed(cluster.host)
    if near == layout.ranks:
        return sent / inside + rounds * cluster.host.latency_us * MICRO
    network = _network(cluster)
    speed = min(inside, near * _speed(network)) if near > 1 else _speed(network)
    return sent / speed + rounds * network.latency_us * MICRO


def all_to_all_seconds(size: int, layout: AxisLayout, cluster: Cluster) -> float:
    """Seconds in which every rank sends a slice of `size` to every other rank."""
    near, part = layout.on_host(cluster), size / layout.ranks
    inside = part * (near - 1) / _speed(cluster.host) + cluster.host.message_us * MICRO * (near - 1)
    if near == layout.ranks:
        return inside + cluster.host.latency_us * MICRO
    network, far = _network(cluster), layout.ranks - near
    outside = part * far / _speed(network) + network.message_us * MICRO * far
    return max(inside, outside) + network.latency_us * MICRO


def message_seconds(size: int, layout: AxisLayout, cluster: Cluster) -> float:
    """Seconds of one message from a rank of an axis to its neighbour."""
    return _transfer(size, cluster.host if layout.on_host(cluster) > 1 else _network(cluster))


def _transfer(size: int, link: Link) -> float:
    return size / _speed(link) + link.latency_us * MICRO


def _speed(link: Link) -> float:
    return link.gb_per_s * link.reached * GIGA


def _network(cluster: Cluster) -> Link:
    if cluster.network is None:
        raise ConfigError("network", "must be given for ranks on several hosts", got="nothing")
    return cluster.network
