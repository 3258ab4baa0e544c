"""Dry runs: one rank of a world of any size, alone in its process, whose launches are recorded and never run.

Memory is addresses that nothing touches, so a model of any size fits. The engine's host code is what runs,
unchanged: whatever it reads from the device is zero, and all ranks are taken to hold what this one holds.
Programs for Triton count as one launch each, as on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import zerodrift
from tests.device import standin
from tests.device.standin import NAME, install, launch_on
from tests.device.strict import StrictGroup, _End
from zerodrift.comm import Collectives
from zerodrift.kernels import device as programs
from zerodrift.model.recipe import RecipeValues

HOME = Path(zerodrift.__file__).parent
OWN = tuple(
    str(Path(__file__).with_name(name)) for name in ("copies.py", "dry.py", "standin.py", "strict.py")
)

PASSES = {"all-reduce": 2}
"""How often an operation sends its buffer over a ring; others once."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event of a device, in the order of the host."""

    what: str
    """`launch`, `collective`, `message`, `copy`, `allocation`, `free` or `wait`."""
    stream: int
    name: str
    """The operation, the kind of a copy or a wait, or the address of memory."""
    size: int
    """Bytes: copied, allocated, or sent by this rank over a ring."""
    origin: str
    """Caller in the engine, as `file.function`; "" for the model and autograd."""


@dataclass
class Recording:
    """The entries of a device."""

    entries: list[Entry] = field(default_factory=list)

    def add(self, what: str, stream: int, name: str, size: int) -> None:
        self.entries.append(Entry(what, stream, name, size, "" if what == "free" else _origin()))

    def of(self, what: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.what == what]


def _origin() -> str:
    """Return the innermost function that is neither torch's nor the stand-in's, if it is the engine's."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(HOME)):
            return f"{Path(file).stem}.{frame.f_code.co_name}"
        if "/torch/" not in file and not file.startswith((*OWN, "<")) and not file.endswith("/contextlib.py"):
            return ""
        frame = frame.f_back
    return ""


class DryGroup(StrictGroup):
    """A communicator whose other ranks are not there."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        dist.ProcessGroup.__init__(self, rank, size)
        self._store, self._device = store, install()
        self._stream = torch.Stream(torch.device(NAME, torch.accelerator.current_device_index()))
        self._number, self._name = next(self.numbers), ""

    def _exchange(self, ends: Sequence[_End], stream: torch.Stream) -> dist.Work:
        self._check("message", [end.tensor for end in ends])
        reads, writes = ([end.tensor for end in ends if end.sends is sends] for sends in (True, False))
        self._device.record("message", stream.stream_id, "", sum(tensor.nbytes for tensor in reads))
        return self._put(f"message of communicator {self._number}", reads, writes, stream, lambda *of: True)

    def _collective(
        self,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        opts: Any,
        begin: Any,
        splits: dict[str, list[int]] | None = None,
    ) -> dist.Work:
        self._check(name, [*reads, *writes])
        stream = self._stream if getattr(opts, "asyncOp", True) else torch.accelerator.current_stream()
        largest = max(tensor.nbytes for tensor in (*reads, *writes))
        sent = PASSES.get(name, 1) * largest * (self.size() - 1) // self.size()
        self._device.record("collective", stream.stream_id, name, sent)
        return self._put(f"{name} of communicator {self._number}", reads, writes, stream, lambda *of: True)


@contextlib.contextmanager
def dry_world(ranks: int) -> Iterator[torch.device]:
    """Be rank 0 of so many, dry, on a device with Triton."""
    install()
    if "dry" not in dist.Backend.backend_list:
        dist.Backend.register_backend("dry", DryGroup, devices=[NAME])
    if dist.is_initialized():
        dist.destroy_process_group()
    held = dist.Backend.default_device_backend_map
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks)))
        stack.enter_context(mock.patch.dict(held, {NAME: "dry"}))
        for target, name, value in (
            (programs, "works", lambda where: where.type == NAME),
            (programs, "obstacle", lambda where: None),
            (programs, "_launch", _launch_program),
            (
                Collectives,
                "all_gather_object",
                lambda self, value, axis="world": _everybody(self, value, axis),
            ),
            (RecipeValues, "fill", lambda self, name, start, out: None),  # initial values are not drawn
            (Collectives, "broadcast_object", lambda self, value, source, axis="world": value),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        if ranks > 1:
            dist.init_process_group("dry", rank=0, world_size=ranks, store=dist.HashStore())
        stack.enter_context(mock.patch.object(standin.device, "dry", True))
        try:
            yield torch.device(NAME, 0)
        finally:
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()


def _launch_program(name: str, flat: torch.Tensor, elements: int, *arguments: Any, **choices: int) -> None:
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    launch_on(f"program {name}", tensors, tensors, lambda: True)


def _everybody(comm: Collectives, value: Any, axis: Any) -> list[Any]:
    """Return every rank's value; the host waits."""
    if comm.mesh.size(axis) > 1:
        standin.device.called("device", 0)
    return [value] * comm.mesh.size(axis)


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Record the entries of the device inside of the `with`."""
    device, recording = standin.device, Recording()
    device.read_log()
    with mock.patch.object(device, "record", recording.add):
        yield recording
        device.read_log()
