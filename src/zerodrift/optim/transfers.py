"""Copies between a device and the host that go on beside the device's work, for `offload`.

Two streams of their own, so that what comes down, what goes up and what the device computes overlap. The host
waits for a copy where it is to read or write what was copied; the device waits where it is told to go on.

Invariant: copies begin after what the device was told before `begin`, and what it is told after `end` begins
after the copies.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class PendingCopy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """The host goes on when the copy is done: then it may read the target, and write over the source."""


class Transfers(Protocol):
    """A way for copies. All of one step are between its `begin` and its `end`."""

    def host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory that copies reach without the host's help, with anything in it."""

    def begin(self) -> None:
        """What is copied from here on has seen everything that the device was told before."""

    def down(self, host: Tensor, there: Tensor) -> PendingCopy:
        """Start to copy from the device to the host."""

    def up(self, there: Tensor, host: Tensor) -> PendingCopy:
        """Start to copy from the host to the device."""

    def end(self) -> None:
        """What the device is told from here on sees every copy."""


class SideStreams:
    """`Transfers` of a device that has streams. A CPU has them in name: there copies are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._streams: Any = torch.get_device_module(device)  # torch.cuda, torch.xpu, torch.cpu
        self._pinned = device.type != "cpu"
        self._device = device
        with self._here():
            self._down, self._up = self._streams.Stream(), self._streams.Stream()

    def _here(self) -> Any:
        """Streams and events are of the current device."""
        return torch.device(self._device) if not self._pinned else self._streams.device(self._device)

    def host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=self._pinned)

    def begin(self) -> None:
        with self._here():
            current = self._streams.current_stream()
            self._down.wait_stream(current)
            self._up.wait_stream(current)

    def down(self, host: Tensor, there: Tensor) -> PendingCopy:
        return self._copy(host, there, self._down)

    def up(self, there: Tensor, host: Tensor) -> PendingCopy:
        return self._copy(there, host, self._up)

    def _copy(self, target: Tensor, source: Tensor, stream: Any) -> PendingCopy:
        with self._here(), self._streams.stream(stream):
            target.copy_(source, non_blocking=True)
            event = self._streams.Event()
            event.record(stream)
        return _Recorded(event)

    def end(self) -> None:
        with self._here():
            current = self._streams.current_stream()
            current.wait_stream(self._down)
            current.wait_stream(self._up)


class _Recorded:
    """An event behind a copy."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
