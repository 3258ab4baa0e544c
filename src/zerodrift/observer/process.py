"""Begins to watch in a process of somebody's command, and leaves what was seen for `check`.

Called by `start`, when the process has imported torch. Processes that never
train (launchers, workers of data loaders) leave an empty record, or none.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from zerodrift.files import is_locked
from zerodrift.observer.launch import END, HELD
from zerodrift.observer.libraries import adapters
from zerodrift.observer.seen import SeenProcess
from zerodrift.observer.watch import Watcher

_LONGEST_WAIT = 120.0
"""Seconds that a process waits for the others."""


def begin(folder: str, steps: int, keep_going: bool) -> None:
    """Watch so many optimizer steps; then end, unless the program is to go on."""
    place = Path(folder)
    leave = [_watched(place, steps, keep_going).end]

    def forked() -> None:
        """Most that are forked load data: what trains is watched from its first forward with gradients on."""
        leave.pop()()
        leave.append(register_module_forward_pre_hook(first).remove)

    def first(module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            leave.pop()()
            watcher = _watched(place, steps, keep_going)
            leave.append(watcher.end)
            watcher.forward_begins(module, args)

    os.register_at_fork(after_in_child=forked)


def _watched(place: Path, steps: int, keep_going: bool) -> Watcher:
    """A watcher of this process, which has begun."""
    record = place / f"{os.getpid()}.json"

    def finished(process: SeenProcess) -> None:
        part = record.with_suffix(".part")
        part.write_text(json.dumps(process.to_json()))
        part.rename(record)
        if process.ended == "steps" and not keep_going:
            _wait_for_others(place)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # which may be closed, or somebody's own
                    stream.flush()
            os._exit(0)

    watcher = Watcher(steps, finished, adapters(), files_after=keep_going)
    watcher.begin()
    record.with_suffix(".began").touch()
    atexit.register(_at_exit, watcher, os.getpid())
    # A process that `multiprocessing` has forked leaves by `os._exit`, after these.
    multiprocessing.util.Finalize(None, _at_exit, (watcher, os.getpid()), exitpriority=0)
    return watcher


def _at_exit(watcher: Watcher, pid: int) -> None:
    if os.getpid() != pid:
        return
    if not watcher.ended:
        watcher.finish("crash" if getattr(sys, "last_value", None) is not None else "exit")
    watcher.files_end()


def _wait_for_others(place: Path) -> None:
    """Other ranks may still need this process to be there; the check says when none does."""
    until = time.monotonic() + _LONGEST_WAIT
    while not (place / END).exists() and is_locked(place / HELD) and time.monotonic() < until:
        time.sleep(0.05)
