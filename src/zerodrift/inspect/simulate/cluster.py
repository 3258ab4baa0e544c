"""What machines can do, as a file describes them: devices, links, and the share of either that is reached.

A file is read as a config is: every key is known and typed. The files in `clusters` come along, to be copied
and changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from zerodrift.config import fields
from zerodrift.config.plain import join
from zerodrift.config.schema import Block, NonNegativeFloat, Positive, PositiveFloat
from zerodrift.config.tree import Keys, TreeReader, tree_of
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, nearest

Share = Annotated[float, Field(gt=0, le=1, strict=True)]
FOLDER = Path(__file__).with_name("clusters")
MICRO, GIGA, TERA = 1e-6, 1e9, 1e12


class Products(Block):
    """TFLOP/s of dense products, by the dtype that is computed in."""

    fp32: PositiveFloat
    """Products of fp32 operands; of TF32 where torch is told to use it."""
    bf16: PositiveFloat | None = None
    """Products of bf16 operands; without them a plan that computes in bf16 is an error."""
    fp16: PositiveFloat | None = None
    """Products of fp16 operands; without them a plan that computes in fp16 is an error."""


class Device(Block):
    """The device of one rank."""

    tflops: Products
    """Figures of its maker, or measured ones."""
    tflops_reached: Share = 1.0
    """The share of that which products of a usual size reach."""
    memory_gb: PositiveFloat
    """GB (10^9 bytes) that a rank may fill."""
    memory_gb_per_s: PositiveFloat
    """GB/s between memory and processor, read and written together."""
    memory_reached: Share = 1.0
    """The share of that which passes over memory reach."""
    new_gb_per_s: PositiveFloat | None = None
    """GB/s at which memory is had from the system and filled. Default: none is, an allocator keeps it."""
    cache_mb: NonNegativeFloat = 0.0
    """Operations that move less than so many MB find them in a cache."""
    cache_gb_per_s: PositiveFloat | None = None
    """GB/s of that cache. Default: as memory."""
    operation_us: NonNegativeFloat = 0.0
    """Microseconds that an operation takes at least, however little it computes."""


class Link(Block):
    """A link between devices."""

    gb_per_s: PositiveFloat
    """GB/s that one device sends, while it receives as much."""
    reached: Share = 1.0
    """The share of that which collectives reach."""
    latency_us: NonNegativeFloat = 0.0
    """Microseconds of one round of messages."""
    message_us: NonNegativeFloat = 0.0
    """Microseconds of each message beyond its bytes, where a rank sends one to every other."""


class Cluster(Block):
    """The machines of a run."""

    device: Device
    """The device of one rank."""
    devices_per_host: Positive
    """Devices that are joined by `host`; ranks that are neighbours share a host."""
    host: Link
    """Link inside a host."""
    network: Link | None = None
    """Link between hosts. Without it there is one host."""
    carrier: Literal["native", "pairs"] = "native"
    """How the engine carries collectives: `native` on NCCL, `pairs` on gloo."""
    compute_beside_link: Share = 1.0
    """How fast a rank computes while something travels, in its speed while nothing does."""
    reserve_gb: NonNegativeFloat = 0.0
    """GB of each device that neither the plan nor activations can have: the libraries' own, and fragments."""
    source: str = ""
    """Origin of the figures."""

    def seconds_of_products(self, flops: float, dtype: DType) -> float:
        return flops / (self.peak(dtype) * self.device.tflops_reached)

    def peak(self, dtype: DType) -> float:
        """Stated FLOP/s."""
        stated: float | None = getattr(self.device.tflops, str(dtype), None)
        if stated is None:
            must = f"must be given, because the plan computes in {dtype}"
            do = "Add it to the cluster's file, in TFLOP/s."
            raise ConfigError(f"device.tflops.{dtype}", must, got="nothing", do=do)
        return stated * TERA

    def seconds_of_bytes(self, count: float) -> float:
        """One pass that reads and writes `count` bytes in all."""
        device = self.device
        if device.cache_gb_per_s is not None and count < device.cache_mb * 1e6:
            return count / (device.cache_gb_per_s * GIGA)
        return count / (device.memory_gb_per_s * device.memory_reached * GIGA)

    def seconds_of_new(self, count: float) -> float:
        """Seconds to allocate `count` bytes that the step before has freed."""
        rate = self.device.new_gb_per_s
        return 0.0 if rate is None else count / (rate * GIGA)

    def require_ranks(self, world: int) -> None:
        if world > self.devices_per_host and self.network is None:
            must = f"must be given for more than the {self.devices_per_host} devices of a host"
            do = "Add it to the cluster's file, or raise `devices_per_host`."
            raise ConfigError("network", must, got=f"{world} ranks", do=do)


def built_in() -> list[str]:
    """Names of the clusters that come along."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_cluster(source: str | os.PathLike[str]) -> tuple[Cluster, Path]:
    """Read a file, or a built-in cluster by its name; return its path too."""
    text = os.fsdecode(source)
    path = FOLDER / f"{text}.yaml" if text in built_in() else Path(text).expanduser()
    if not path.exists():
        close = nearest(text, built_in())
        meant = f"Did you mean `{close[0]}`? " if close else ""
        must = f"must be the file of a cluster, or one of {', '.join(built_in())}"
        do = f"{meant}Copy one of those from {FOLDER} and change it."
        raise ConfigError("--simulate", must, got=repr(text), do=do)
    heading, tree, problems = tree_of(path, "cluster")
    reader = TreeReader(KEYS, problems)
    cluster = reader.validated(reader.used(tree))
    problems.raise_as(ConfigError, heading)
    if not isinstance(cluster, Cluster):
        raise AssertionError("a cluster that is not valid must have a problem")
    return cluster, path


def _suggestion(key: str, block: type[BaseModel] | None, path: str) -> str:
    known = fields.fields(block) if block is not None else {}
    paths = [join(path, word) for word in nearest(key, known)]
    if not paths:
        every = (each.path for each in fields.every_key(Cluster))
        paths = [other for other in every if other.rpartition(".")[2] == key]
    if not paths:
        return "See docs/simulate.md."
    return f"Did you mean {' or '.join(f'`{name}`' for name in paths[:3])}?"


KEYS = Keys("cluster", Cluster, "a cluster", _suggestion)
