"""The mesh with ranks in it: named axes, their process groups, and this rank's place on each.

Only this file and `rendezvous.py` read RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*. `zerodrift.mesh` has the
arithmetic of the shape. A mesh joins by torchrun's variables, uses the ranks of a process group that is
already initialized, or is a world of one without a process group.

Invariant: an axis has a group exactly if it has more than one rank, every rank builds the groups in the same
order, and `stop` destroys what this mesh created and nothing else.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist

from zerodrift.comm.rendezvous import meet
from zerodrift.comm.shared import SharedMemory, share
from zerodrift.comm.watch import CollectiveLog, CollectiveWait, DeadlockWatch, ranks_text
from zerodrift.errors import MeshError, Problems, RankError, first_line
from zerodrift.mesh import MeshShape

AxisName = Literal[
    "shard",
    "replicate",
    "pipeline",
    "data",
    "world",
    "expert",
    "expert_shard",
    "secondary",
    "expert_secondary",
    "ends",
    "tensor",
]
"""`data`: shard x replicate, ranks with different data. `world`: all ranks. `expert` and `expert_shard`: a
shard group folded into ranks with different experts, and ranks with the same. `secondary` and
`expert_secondary`: neighbours on `shard` and `expert_shard` that share a second copy of the blocks. `tensor`:
ranks of a user's DTensor, with the same data. `ends`: the first and the last stage of a pipeline."""

AXES: tuple[AxisName, ...] = get_args(AxisName)

TIMEOUT = 600.0
"""Seconds that a collective waits for the other ranks before it raises."""

LEAVING = 0.1
"""Seconds that the interpreter's exit waits for the threads of gloo."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis, as seen by this rank."""

    name: AxisName
    ranks: range
    """World ranks along the axis, in the order in which sums are formed."""
    rank: int
    """This rank's place among them."""
    group: dist.ProcessGroup | None
    """None if this rank is alone."""
    trail: CollectiveLog
    """The log of `group`, shared by axes that share a group."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def slice(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the equal slice of a flat buffer that belongs to `rank` of this axis."""
        count = flat.numel() // self.size
        return flat[rank * count : (rank + 1) * count]

    def begin(self, op: str, of: str) -> StartedCollective:
        """Log the next collective. `of` says what is moved, in words that are the same on all ranks."""
        what = f"{op} of {of}" if of else op
        return StartedCollective(self, self.trail.add(what), op, what)

    def missing(self, op: str, error: Exception, peer: int | None = None) -> RankError:
        """Return the error for ranks of this axis, or one of them, that did not take part."""
        others = [rank for rank in self.ranks if rank != self.ranks[self.rank]]
        missing = ranks_text(others if peer is None else [self.ranks[peer]])
        do = (
            "That rank died, hangs, or is in another collective: look at the output of the rank that "
            "failed first. If it was only slow, start the mesh with a longer `timeout`."
        )
        must, got = f"{missing} must take part within the timeout", repr(first_line(error))
        return RankError(f"`{op}` on axis `{self.name}`", must, got=got, do=do)


@dataclass(frozen=True, slots=True)
class StartedCollective:
    """One collective of an axis."""

    line: Axis
    number: int
    op: str
    what: str
    """The operation and what it moves, the same on every rank that takes part."""


class Mesh:
    """A `MeshShape` whose ranks are running. Made by `start`."""

    def __init__(
        self,
        shape: MeshShape,
        device: torch.device,
        axes: Mapping[AxisName, Axis],
        created: tuple[dist.ProcessGroup, ...],
        shared: SharedMemory | None,
    ) -> None:
        self.shape = shape
        self.device = device
        self.shared = shared
        """Memory that ranks of this host share; None if there is none."""
        self._axes = axes
        self._created = created
        trails = {id(axis.trail): axis.trail for axis in axes.values() if axis.group is not None}
        self.watch = DeadlockWatch(axes["world"].rank, list(trails.values()), created, device.type)
        weakref.finalize(self, self.watch.stop)
        self._unshare = weakref.finalize(self, shared.close) if shared is not None else None

    def at(self, turn: StartedCollective) -> CollectiveWait:
        """Return a context in which this rank is in a collective. A deadlock raises its error there."""
        return CollectiveWait(self.watch, turn.what, turn.number, turn.line.ranks)

    @property
    def asynchronous(self) -> bool:
        """Whether the device works beside the host, which waits only where it reads a value."""
        return self.device.type != "cpu"

    def axis(self, name: AxisName) -> Axis:
        return self._axes[name]

    def group(self, name: AxisName) -> dist.ProcessGroup | None:
        """Return the process group of an axis; None if this rank is alone on it."""
        return self.axis(name).group

    def size(self, name: AxisName) -> int:
        return self.axis(name).size

    def rank(self, name: AxisName = "world") -> int:
        """Return this rank's coordinate on an axis."""
        return self.axis(name).rank

    def stop(self) -> None:
        """Destroy the process groups that this mesh created. Safe to call twice."""
        self.watch.stop()
        if self._unshare is not None:
            self._unshare()
        created, self._created = self._created, ()
        # Last made, first destroyed: destroying the default group takes the others with it.
        for group in reversed(created):
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def __repr__(self) -> str:
        return f"Mesh({self.shape}, rank {self.rank()} of {self.size('world')} on {self.device})"


@dataclass(frozen=True, slots=True)
class _Process:
    """The ranks of this process, before any group is made."""

    source: Literal["alone", "launcher", "running"]
    """One rank alone; torchrun's variables; or a default group that the caller has initialised."""
    rank: int
    world: int
    local: int
    """The rank on this machine, which chooses the GPU."""


def start(
    shape_for: Callable[[int], MeshShape] | MeshShape,
    device: torch.device | str | None = None,
    timeout: float = TIMEOUT,
) -> Mesh:
    """Join the other ranks. `shape_for` is the shape, or returns it for a world size.

    `timeout`, in seconds, holds for every group that is created here. The default device is the GPU of this
    local rank if there is one, and the CPU if not.
    """
    process = _this_process()
    # Checked before any rank joins, so that every rank raises and none is left waiting.
    shape = shape_for if isinstance(shape_for, MeshShape) else shape_for(process.world)
    if shape.world != process.world:
        got = f"{shape} = {shape.world} for {process.world}"
        do = f"Start {shape.world} ranks (`torchrun --nproc-per-node={shape.world}`) or change the sizes."
        raise MeshError("mesh", "must have as many ranks as were started", got=got, do=do)
    place = _device(process, device)
    created: list[dist.ProcessGroup] = []
    if process.world > 1:
        leave_slowly()
        created.append(_world_group(process, place, timeout))
    try:
        axes = _axes(shape, process.rank, created, timeout)
        shared = None
        if created and place.type == "cpu" and dist.get_backend(created[0]) == "gloo":
            shared = share(created[0], process.rank, process.world)
    except RuntimeError as error:
        must = f"all {process.world} ranks must build their groups"
        do = "Look at the output of the rank that failed first."
        raise RankError("mesh", must, got=repr(first_line(error)), do=do) from error
    return Mesh(shape, place, axes, tuple(created), shared)


def usable_accelerator() -> torch.device | None:
    """Return the accelerator that this torch has, if there is one on this machine and it can train."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and _can_train(found) else None


def _can_train(device: torch.device) -> bool:
    """Return True if a device has streams and float64, in which squares are summed; mps has no float64."""
    return device.type != "mps" and hasattr(torch.get_device_module(device), "Stream")


def leave_slowly() -> None:
    """Let the interpreter's exit wait a moment for gloo's threads. Call it where a process group is started.

    The threads free the tensors of a collective after its end, for which they need the interpreter's lock.
    One that asks for it while the interpreter closes aborts the process: one in five scripts that end after a
    collective did. Destroying a group does not wait for its threads while there are references to it.
    """
    atexit.unregister(time.sleep)
    atexit.register(time.sleep, LEAVING)


def started() -> tuple[int, int]:
    """Return this rank and the number of ranks, which are known before any has joined."""
    process = _this_process()
    return process.rank, process.world


def _this_process() -> _Process:
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        return _Process("running", rank, dist.get_world_size(), _local_rank(rank))
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return _Process("alone", 0, 1, 0)
    problems = Problems()
    rank, world = _number("RANK", problems), _number("WORLD_SIZE", problems)
    if not problems and not 0 <= rank < world:
        problems.add("RANK", f"must be at least 0 and below WORLD_SIZE={world}", got=str(rank), do=_LAUNCH)
    if not problems and world > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                problems.add(name, f"must be set to join {world} ranks", got="nothing", do=_LAUNCH)
        port = os.environ.get("MASTER_PORT") or "0"
        if not port.strip().isdecimal() or int(port) > 65_535:
            problems.add("MASTER_PORT", "must be a port, 0 to 65535", got=repr(port), do=_LAUNCH)
    problems.raise_as(MeshError)
    return _Process("launcher" if world > 1 else "alone", rank, world, _local_rank(rank))


_LAUNCH = "Start with `torchrun`, which sets all of them, or unset RANK and WORLD_SIZE to run alone."


def _number(name: str, problems: Problems) -> int:
    text = os.environ.get(name)
    if text is None or not text.strip().lstrip("-").isdecimal():
        got = "nothing" if text is None else repr(text)
        problems.add(name, "must be a whole number", got=got, do=_LAUNCH)
        return 0
    return int(text)


def _local_rank(rank: int) -> int:
    """Return LOCAL_RANK, or without one the rank itself, as if all ranks were on one machine."""
    if "LOCAL_RANK" not in os.environ:
        count = torch.accelerator.device_count()
        return rank % count if count else rank
    problems = Problems()
    local = _number("LOCAL_RANK", problems)
    problems.raise_as(MeshError)
    return local


def _device(process: _Process, asked: torch.device | str | None) -> torch.device:
    if asked is None:
        found = usable_accelerator()
        asked = found if found is not None and _carries(process, found.type) else "cpu"
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError):
        must = "must be a device of torch, such as 'cpu' or 'cuda:0'"
        raise MeshError("device", must, got=repr(asked)) from None
    if device.type == "cpu":
        return device
    accelerator = torch.accelerator.current_accelerator()
    got, do = repr(str(device)), "Use `cpu`."
    if not _carries(process, device.type):
        must = "must fit the backend of the running process group"
        got = f"a {device.type} device and {dist.get_backend()!r}"
        backend = dist.get_default_backend_for_device(device.type)
        do = f"Initialize torch.distributed with `{backend}`, or pass `device='cpu'`."
    elif device.type == "cuda" and not torch.cuda.is_available():
        must, got = "must be one that this machine has", "`cuda`, where torch finds no GPU"
        do = "Use `cpu`; or install a build of torch for CUDA, and a driver."
    elif accelerator is None or device.type != accelerator.type:
        must = "must be `cpu`, `cuda` or the accelerator of this torch"
    elif not _can_train(device):
        must = "must be a device with streams and float64"
    else:
        return _own_device(process, device)
    raise MeshError("device", must, got=got, do=do)


def _own_device(process: _Process, device: torch.device) -> torch.device:
    """Make the accelerator of this rank the current one."""
    index, count = process.local if device.index is None else device.index, torch.accelerator.device_count()
    if index >= count:
        must = f"must be below the {count} GPUs of this machine"
        do = "Start one rank per GPU (`--nproc`, `--nproc-per-node`), or use `cpu`."
        raise MeshError("LOCAL_RANK", must, got=index, do=do)
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def _carries(process: _Process, kind: str) -> bool:
    """Return whether the ranks can talk on such a device: always, unless a caller chose the backend."""
    backend = dist.Backend.default_device_backend_map.get(kind, "")
    return process.source != "running" or process.world == 1 or backend in dist.get_backend_config()


def _world_group(process: _Process, device: torch.device, timeout: float) -> dist.ProcessGroup:
    limit = timedelta(seconds=timeout)
    if process.source == "running":
        # A separate group: our messages cannot meet the caller's, our timeout holds, and a rank that dies in
        # our collectives does not break the caller's group.
        return dist.new_group(list(range(process.world)), timeout=limit)
    try:
        dist.init_process_group(
            backend=dist.get_default_backend_for_device(device.type),
            store=meet(process.rank, process.world, limit),
            rank=process.rank,
            world_size=process.world,
            timeout=limit,
            device_id=None if device.type == "cpu" else device,
        )
    except RuntimeError as error:
        must = f"all {process.world} ranks must join within {timeout:g} s"
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        do = f"See that every rank was started and can reach MASTER_ADDR {address!r}, MASTER_PORT {port!r}."
        raise RankError("mesh", must, got=f"{first_line(error)!r} on rank {process.rank}", do=do) from error
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised without a default group"
    return world


def _axes(
    shape: MeshShape, rank: int, created: list[dist.ProcessGroup], timeout: float
) -> dict[AxisName, Axis]:
    """Return every axis of this rank; append new groups to `created`."""
    world = range(shape.world)
    groups = {world: (created[0] if created else None, CollectiveLog(world))}
    axes: dict[AxisName, Axis] = {}
    for name in AXES:
        mine = _line(shape, rank, name)
        # Every rank builds the groups of every line, in one order. torch can also build a group among its
        # members alone, but names it so that one built after a `stop` meets the addresses that the first left
        # in the store, and hangs.
        for line in _lines(shape, name):
            if line not in groups:
                group = dist.new_group(list(line), timeout=timedelta(seconds=timeout))
                if rank in line:
                    created.append(group)
                groups[line] = (group, CollectiveLog(line))
        groups.setdefault(mine, (None, CollectiveLog(mine)))
        axes[name] = Axis(name, mine, mine.index(rank), *groups[mine])
    return axes


def _lines(shape: MeshShape, axis: AxisName) -> Iterator[range]:
    """Yield the lines of an axis that need a group, in the order of their first ranks."""
    seen: set[int] = set()
    for rank in range(shape.world if len(_line(shape, 0, axis)) > 1 else 0):
        if rank not in seen:
            line = _line(shape, rank, axis)
            seen.update(line)
            if len(line) > 1:
                yield line


def _line(shape: MeshShape, rank: int, axis: AxisName) -> range:
    """Return the world ranks on the axis through `rank`. `tensor` is numbered fastest, then `shard`, and
    `pipeline` slowest."""
    tensor, data = shape.tensor, shape.tensor * shape.data
    sizes_and_strides: dict[AxisName, tuple[int, int]] = {
        "tensor": (tensor, 1),
        "shard": (shape.shard, tensor),
        "expert": (shape.expert, tensor),
        "expert_shard": (shape.shard // shape.expert, tensor * shape.expert),
        "secondary": (shape.secondary, tensor),
        "expert_secondary": (shape.expert_secondary, tensor * shape.expert),
        "replicate": (shape.replicate, tensor * shape.shard),
        "data": (shape.data, tensor),
        "pipeline": (shape.pipeline, data),
        "ends": (shape.pipeline, data),
        "world": (shape.world, 1),
    }
    size, stride = sizes_and_strides[axis]
    first = rank - rank // stride % size * stride
    line = range(first, first + size * stride, stride)
    if axis != "ends":
        return line
    ends = line[:: max(1, size - 1)]
    return ends if rank in ends else range(rank, rank + 1)
