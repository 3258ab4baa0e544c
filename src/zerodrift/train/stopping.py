"""How a run is asked to stop: the first signal asks, the second does not ask.

After SIGINT or SIGTERM the loop finishes its step, writes a checkpoint and leaves with 0. Whoever sends a
second one wants to be out at once.

Invariant: signals mean what they meant before once the context is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody has asked."""

    def __init__(self) -> None:
        self.asked = False
        self.by = ""

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        if self.asked:
            # Threads of torch and of gloo would have to be waited for by a polite exit.
            os._exit(128 + number)
        self.asked = True
        self.by = signal.Signals(number).name


@contextlib.contextmanager
def listening() -> Iterator[Stop]:
    """Signals go to the Stop that is yielded."""
    stop = Stop()
    before = {number: signal.signal(number, stop.ask) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
