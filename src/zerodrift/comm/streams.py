"""CUDA streams for collectives: one for gathers and one for reductions, beside that of the computation.

Neither waits for the other, and casts and additions of a sum run beside the computation too.

[Note: buffers on streams] A buffer belongs to the stream that it was allocated on, and is free for others
of that stream as soon as the host drops it. The buffers of a collective were allocated where the engine
computes, so its handle holds them until that stream has been told to wait for the collective. Whatever takes
their memory afterwards comes later on the same stream. Memory that is allocated inside of a stream is used
there alone. So no `record_stream` is needed, whose memory comes back when the host happens to look.

Invariant: nothing here makes the host wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class CommunicationStream:
    """One stream beside that of the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current stream, after all work that the computation was given before."""
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            yield

    def wait_for_work(self, *buffers: torch.Tensor) -> Callable[[], None]:
        """Return a function that makes the computation wait for all work in the stream now.

        It holds the buffers until then; see [Note: buffers on streams].
        """
        done, held = self._stream.record_event(), list(buffers)

        def wait() -> None:
            self._streams.current_stream(self._device).wait_event(done)
            held.clear()

        return wait
