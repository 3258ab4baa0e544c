"""Stop a run by signals: the first one asks, the second one ends it at once.

After SIGINT or SIGTERM the loop finishes its step and saves a checkpoint, and the command ends with 128 and
the number of the signal, 130 for Ctrl-C. Before the first step there is nothing to finish, and it ends at
once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

IN_ORDER = 64
"""Base of the exit codes of a rank that was stopped in order; the number of its signal is added.

The code alone means that another rank was asked."""

STEP = "finishing this step, then saving"
END = "the run is ending: finishing what it writes"
FIRST = "{name}: {what}\n{name} again: stop at once, without saving"
SECOND = "{name}: stopped at once, without saving\nstart again to go on from the last checkpoint"
EARLY = "{name}: stopped before the first step, with nothing to save"


def exit_code(name: str) -> int:
    """Return the exit code of a run that a signal ended; that of Ctrl-C if another machine was asked."""
    return 128 + signal.Signals[name if name in signal.Signals.__members__ else "SIGINT"]


def signal_name(name: str) -> str:
    """Return a signal's name as people know it."""
    return {"SIGINT": "Ctrl-C"}.get(name, name)


def announce(text: str, number: int, what: str = STEP) -> None:
    """Print from a signal handler, which may have interrupted a print, below the live line."""
    line = text.format(name=signal_name(signal.Signals(number).name), what=what)
    with contextlib.suppress(OSError):
        os.write(1, f"{os.linesep if os.isatty(1) else ''}{line}{os.linesep}".encode())


class Stop:
    """The request to stop a run."""

    def __init__(self, prints: bool = True, launched: bool = False) -> None:
        """A `launched` rank leaves signals before the first step to its launcher."""
        self.asked = False
        self.by = ""
        """Name of the signal."""
        self.doing = ""
        """Work that is finished first; empty before the first step."""
        self._prints, self._launched = prints, launched

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        if not self.doing:
            if not self._launched:
                self._announce(EARLY, number)
            sys.exit(128 + number)
        if self.asked:
            self._announce(SECOND, number)
            # A normal exit would wait for threads of torch and gloo.
            os._exit(128 + number)
        self._announce(FIRST, number)
        self.asked = True
        self.by = signal.Signals(number).name

    def _announce(self, text: str, number: int) -> None:
        if self._prints:
            announce(text, number, self.doing)


@contextlib.contextmanager
def listen(prints: bool = True, launched: bool = False) -> Iterator[Stop]:
    """Send signals to the `Stop` that is yielded, and restore their handlers at the end."""
    stop = Stop(prints, launched)
    before = {number: signal.signal(number, stop.ask) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
