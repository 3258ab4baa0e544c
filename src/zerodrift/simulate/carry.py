"""How long a collective takes: what of it stays inside of a host, what leaves it, and over what.

Which way it goes is the engine's (`comm/collectives.py`): a gather round a ring; a sum as slices from
everybody to everybody, by halves, or as NCCL's own. On gloo all of it goes as messages between pairs.

Invariant: pure. What the processor does when a collective has ended, adding what arrived, is told apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerodrift.comm.collectives import DIRECT, HALVING
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError
from zerodrift.mesh import MeshShape
from zerodrift.plan.schedule import Collective
from zerodrift.plan.table import Plan
from zerodrift.simulate.cluster import GIGA, MICRO, Cluster, Link


@dataclass(frozen=True, slots=True)
class AxisLine:
    """The ranks of an axis, as they lie on hosts."""

    ranks: int
    apart: int
    """How far neighbours of the axis are from each other, in ranks."""

    def on_host(self, cluster: Cluster) -> int:
        return max(1, min(self.ranks, cluster.devices_per_host // self.apart))


def line(mesh: MeshShape, axis: str) -> AxisLine:
    shard = mesh.tensor * mesh.shard
    return {
        "shard": AxisLine(mesh.shard, mesh.tensor),
        "expert": AxisLine(mesh.expert, mesh.tensor),
        "expert_shard": AxisLine(mesh.expert_shard, mesh.tensor * mesh.expert),
        "replicate": AxisLine(mesh.replicate, shard),
        "pipeline": AxisLine(mesh.pipeline, shard * mesh.replicate),
        "ends": AxisLine(2, shard * mesh.replicate * max(1, mesh.pipeline - 1)),
    }[axis]


@dataclass(frozen=True, slots=True)
class Carried:
    """One collective on its way."""

    seconds: float
    """From its beginning, on a link that is free."""
    added: int
    """Bytes that a rank reads and writes to add what has arrived, once it waits for it."""


def carried(call: Collective, plan: Plan, cluster: Cluster) -> Carried:
    """A collective of the plan's list."""
    ranks, size = line(plan.mesh, call.axis), call.numel * call.dtype.size
    if ranks.ranks == 1:
        return Carried(0.0, 0)
    if call.op == "all_gather":
        return Carried(_gather(size, ranks, cluster), 0)
    if call.op == "reduce_scatter":
        return _reduce(call, size, ranks, plan, cluster)
    if call.dtype is DType.INT64 and (cluster.carrier == "native" or ranks.ranks > 4):
        return Carried(_ring(2 * size, ranks, cluster), 0)
    if size <= DIRECT or ranks.ranks == 2 or call.numel % ranks.ranks:
        everything = size * ranks.ranks
        return Carried(to_all(everything, ranks, cluster), everything + size)
    reduced = _reduce(call, size, ranks, plan, cluster)
    return Carried(reduced.seconds + _gather(size, ranks, cluster), reduced.added)


def _reduce(call: Collective, size: int, ranks: AxisLine, plan: Plan, cluster: Cluster) -> Carried:
    total = call.sum or call.dtype
    update = plan.segments[call.segment].columns.update if call.segment >= 0 else None
    order = update.reduce.order if update is not None else "rank"
    mine = size // ranks.ranks
    power = not ranks.ranks & (ranks.ranks - 1)
    if order == "tree" and total is call.dtype and power and ranks.ranks >= HALVING[cluster.carrier]:
        seconds, distance, part, added = 0.0, 1, size // 2, 0
        while distance < ranks.ranks:
            inside = distance < ranks.on_host(cluster)
            seconds += _sent(part, cluster.host if inside else _network(cluster))
            added += 3 * part
            distance, part = 2 * distance, part // 2
        return Carried(seconds, added)
    if order == "native" and cluster.carrier == "native" and total is call.dtype:
        return Carried(_ring(size, ranks, cluster), 3 * mine)
    return Carried(to_all(size, ranks, cluster), size + 2 * mine * total.size // call.dtype.size)


def _gather(size: int, ranks: AxisLine, cluster: Cluster) -> float:
    return _ring(size, ranks, cluster) if cluster.carrier == "native" else to_all(size, ranks, cluster)


def _ring(size: int, ranks: AxisLine, cluster: Cluster) -> float:
    """Round all ranks, as often as a host has of them at once, each over a card of its own."""
    near = ranks.on_host(cluster)
    rounds = math.ceil(math.log2(ranks.ranks))
    sent = size * (ranks.ranks - 1) / ranks.ranks
    inside = _speed(cluster.host)
    if near == ranks.ranks:
        return sent / inside + rounds * cluster.host.latency_us * MICRO
    network = _network(cluster)
    speed = min(inside, near * _speed(network)) if near > 1 else _speed(network)
    return sent / speed + rounds * network.latency_us * MICRO


def to_all(size: int, ranks: AxisLine, cluster: Cluster) -> float:
    """A slice of `size` from every rank to every other."""
    near = ranks.on_host(cluster)
    part = size / ranks.ranks
    inside = part * (near - 1) / _speed(cluster.host) + cluster.host.message_us * MICRO * (near - 1)
    if near == ranks.ranks:
        return inside + cluster.host.latency_us * MICRO
    network, far = _network(cluster), ranks.ranks - near
    outside = part * far / _speed(network) + network.message_us * MICRO * far
    return max(inside, outside) + network.latency_us * MICRO


def message(size: int, ranks: AxisLine, cluster: Cluster) -> float:
    """From one rank of an axis to its neighbour."""
    return _sent(size, cluster.host if ranks.on_host(cluster) > 1 else _network(cluster))


def _sent(size: int, link: Link) -> float:
    return size / _speed(link) + link.latency_us * MICRO


def _speed(link: Link) -> float:
    return link.gb_per_s * link.reached * GIGA


def _network(cluster: Cluster) -> Link:
    if cluster.network is None:
        raise ConfigError("network", "must be given for ranks on several hosts", got="nothing")
    return cluster.network
