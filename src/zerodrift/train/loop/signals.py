"""How a run is asked to stop: the first signal asks, the second does not ask.

After SIGINT or SIGTERM the loop finishes its step, writes a checkpoint, and the command ends with 128 and
the signal's number, 130 for Ctrl-C: the run has not come to its end. Before the first step there is nothing
to finish, and it ends at once. Whoever sends a second signal wants to be out at once. Each says what it does.

Invariant: signals mean what they meant before once the context is left.
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
"""A rank's exit code, with the number of its signal added, where it ended in order: that is the launcher's to
tell. Without a number it was another rank that was asked."""

STEP = "finishing this step, then saving"
END = "the run is ending: finishing what it writes"
FIRST = "{name}: {what}\n{name} again: stop at once, without saving"
SECOND = "{name}: stopped at once, without saving\nstart again to go on from the last checkpoint"
EARLY = "{name}: stopped before the first step, with nothing to save"


def exit_code(name: str) -> int:
    """Of a run that a signal ended; that of Ctrl-C where it was asked on another machine."""
    return 128 + signal.Signals[name if name in signal.Signals.__members__ else "SIGINT"]


def shown(name: str) -> str:
    """A signal as a person knows it."""
    return {"SIGINT": "Ctrl-C"}.get(name, name)


def tell(text: str, number: int, what: str = STEP) -> None:
    """Say it now, from a handler of signals, which may have interrupted a print: below the line that is
    drawn over and over, on a line of its own."""
    line = text.format(name=shown(signal.Signals(number).name), what=what)
    with contextlib.suppress(OSError):
        os.write(1, f"{os.linesep if os.isatty(1) else ''}{line}{os.linesep}".encode())


class Stop:
    """Whether somebody has asked."""

    def __init__(self, tells: bool = True, launched: bool = False) -> None:
        """`tells` is of the process that a person looks at; one that was `launched` leaves what comes before
        the first step to its launcher."""
        self.asked = False
        self.by = ""
        self.doing = ""
        """What is finished first; nothing before the first step."""
        self._tells, self._launched = tells, launched

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        if not self.doing:
            if not self._launched:
                self._tell(EARLY, number)
            sys.exit(128 + number)
        if self.asked:
            self._tell(SECOND, number)
            # Threads of torch and of gloo would have to be waited for by a polite exit.
            os._exit(128 + number)
        self._tell(FIRST, number)
        self.asked = True
        self.by = signal.Signals(number).name

    def _tell(self, text: str, number: int) -> None:
        if self._tells:
            tell(text, number, self.doing)


@contextlib.contextmanager
def listening(tells: bool = True, launched: bool = False) -> Iterator[Stop]:
    """Signals go to the Stop that is yielded."""
    stop = Stop(tells, launched)
    before = {number: signal.signal(number, stop.ask) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
