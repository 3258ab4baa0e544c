"""Begins to watch in a process of somebody's command, and leaves what was seen for `check`.

Called by `start`, when the process has imported torch. Processes that never
train (launchers, workers of data loaders) leave an empty record, or none.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path

from zerodrift.observer.launch import END
from zerodrift.observer.libraries import adapters
from zerodrift.observer.seen import SeenProcess
from zerodrift.observer.watch import Watcher

_LONGEST_WAIT = 120.0
"""Seconds that a process waits for that file."""


def begin(folder: str, steps: int, keep_going: bool) -> None:
    """Watch so many optimizer steps; then end, unless the program is to go on."""
    place = Path(folder)

    def finished(process: SeenProcess) -> None:
        path = place / f"{os.getpid()}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(process.to_json()))
        part.rename(path)
        if process.ended == "steps" and not keep_going:
            _wait(place / END)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    watcher = Watcher(steps, finished, adapters(), files_after=keep_going)
    watcher.thread = threading.main_thread().ident or watcher.thread  # torch may be imported by another
    watcher.begin()
    atexit.register(_at_exit, watcher, os.getpid())
    os.register_at_fork(after_in_child=watcher.end)


def _at_exit(watcher: Watcher, pid: int) -> None:
    if os.getpid() != pid:
        return
    if not watcher.ended:
        watcher.finish("crash" if getattr(sys, "last_value", None) is not None else "exit")
    watcher.files_end()


def _wait(end: Path) -> None:
    """Other ranks may still need this process to be there."""
    until = time.monotonic() + _LONGEST_WAIT
    while not end.exists() and time.monotonic() < until and end.parent.exists():
        time.sleep(0.05)
