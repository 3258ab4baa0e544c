"""Streams of their own for what travels, on a device that goes on beside the host.

Gathers have one and reductions another, so neither waits for the other, and what is done to a sum on the way
(casts, additions) is done beside the computation. A CPU has none: there collectives go on by themselves.

[Note: buffers on lanes] A buffer belongs to the stream that it was allocated on, and is free for others of
that stream as soon as nobody holds it on the host. What a collective reads and writes was allocated where the
engine computes, so its handle holds it until that stream has been told to wait for the collective. After
that, whatever takes its memory comes later on the same stream. What is allocated inside of a lane is used
there alone. So no `record_stream` is needed, whose memory comes back when the host happens to look.

Invariant: nothing here makes the host wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Lane:
    """One stream beside that of the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What is told to the device inside begins after all that it was told before."""
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            yield

    def joined(self, *held: torch.Tensor) -> Callable[[], None]:
        """What makes the computation go on after all that is in the lane now. It holds these buffers until
        then; see [Note: buffers on lanes]."""
        arrived, buffers = self._stream.record_event(), list(held)

        def join() -> None:
            self._streams.current_stream(self._device).wait_event(arrived)
            buffers.clear()

        return join
