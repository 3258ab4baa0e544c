"""Let the CPU play an asynchronous device: find where the host would wait, and record the calls of streams.

On a GPU the host waits wherever a value is asked for, wherever the size of a result depends on values, and
wherever something is copied from memory that is not pinned.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import zerodrift
from zerodrift.comm import collectives
from zerodrift.comm import native as carrier
from zerodrift.comm.mesh import Mesh
from zerodrift.kernels import device, native
from zerodrift.kernels.digests import reference_prints
from zerodrift.kernels.squares import reference_digits, reference_square_sums
from zerodrift.optim import fused

HOME = str(Path(zerodrift.__file__).parent)

ASKED = frozenset(("tolist", "numpy", "cpu", "__array__"))
"""Functions of Python that read values without an operation below."""
SENT = frozenset(("tensor", "as_tensor"))
"""Functions that copy from the host when they get a device."""
SIZED = frozenset((
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive",
    "unique_dim", "bincount",
))  # fmt: skip
"""Operations that read values."""


class Waits(TorchFunctionMode):
    """Record the places where the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._below = _Operations(self)

    def add(self, name: str) -> None:
        lines = [frame for frame in traceback.extract_stack() if frame.filename.startswith(HOME)]
        at = f"{Path(lines[-1].filename).stem}.{lines[-1].name}" if lines else "the model"
        self.found.append(f"{name} in {at}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        where = kwargs.get("device")
        is_sent = name in SENT and where is not None and where is not fused.CPU  # what is named so stays
        if name in ASKED or is_sent:
            self.add(name)
        if name == "__setitem__" and isinstance(args[2], (int, float)) and not args[0][args[1]].dim():
            self.add(name)  # a number of the host is copied
        if name == "to" and any(isinstance(value, torch.device) for value in (*args, *kwargs.values())):
            self.add("to")
        return func(*args, **kwargs)

    def __enter__(self) -> Any:
        self._below.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._below.__exit__(*error)


class _Operations(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        picked = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        repeated = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in SIZED or picked or repeated:
            self._waits.add(name)
        return func(*args, **(kwargs or {}))


class Streams:
    """A stand-in for the streams of `torch.cuda`, which records their calls in the order of the host."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []
        self._current = [FakeStream(self, "main")]
        self._count = 0

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        self._count += 1
        return FakeStream(self, f"lane {self._count}")

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return self._current[-1]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def tell(self, *what: str) -> None:
        self.told.append((self.current_stream().name, *what))


class FakeStream:
    """A stream without `synchronize`, so that a call of it fails."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name
        self.events = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.streams.told.append((self.name, "waits for", other.name))

    def record_event(self) -> str:
        self.events += 1
        self.streams.told.append((self.name, "event", str(self.events)))
        return f"{self.name} event {self.events}"

    def wait_event(self, event: str) -> None:
        self.streams.told.append((self.name, "waits for", event))


def play_a_gpu(patch: pytest.MonkeyPatch) -> Streams:
    """Let this process take its CPU for an asynchronous device that has Triton."""
    streams = Streams()
    patch.setattr(Mesh, "asynchronous", property(lambda mesh: True))
    patch.setattr(torch, "get_device_module", lambda device=None: streams)
    patch.setattr(native, "library", lambda: None)
    patch.setattr(fused, "compiled_for", lambda where, step: None)
    patch.setattr(device, "works", lambda where: True)
    patch.setattr(device, "update", lambda *slices, **choices: streams.tell("update"))
    patch.setattr(device, "squares", lambda flat, out: out.copy_(reference_square_sums(flat)))
    patch.setattr(device, "prints", lambda words, out: out.copy_(reference_prints(words)))
    patch.setattr(device, "digits", lambda sums, out, lowest: reference_digits(sums, out))
    made = collectives.Collectives.__init__

    def carried(self: Any, mesh: Any, carrier: Any = None) -> None:
        made(self, mesh, "native")

    patch.setattr(collectives.Collectives, "__init__", carried)
    for name in ("all_gather_single", "reduce_scatter_single", "all_to_all_single"):
        patch.setattr(torch.distributed, name, _recording(streams, name, getattr(torch.distributed, name)))
    swap = carrier.exchange
    swapped = lambda group, partner, out, into: swap(group, partner, out, into.zero_())  # noqa: E731
    patch.setattr(carrier, "exchange", swapped)
    return streams


def _recording(streams: Streams, name: str, call: Any) -> Any:
    def told(*args: Any, **kwargs: Any) -> Any:
        assert not kwargs.get("async_op")
        streams.tell(name)
        if name != "all_gather_single":
            args[0].zero_()  # the fake group brings nothing, and memory may hold what is no number
        return call(*args, **kwargs)

    return told
