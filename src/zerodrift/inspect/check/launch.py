"""Watch a command, with a watcher in each of its Python processes, or a loop of this process.

`startup` calls `watch_with_torch` at the start of every Python process, which waits for the import of torch.
A process that never trains leaves an empty record, or none.

Invariant: no process of the command outlives the check. If the check is killed, each process ends when it has
seen its steps, unless it keeps going. Importing this file imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zerodrift.errors import ModelError, ZerodriftError
from zerodrift.files import is_locked, locked
from zerodrift.inspect.trace import ModelRecord, ProcessRecord
from zerodrift.startup import StartupHook, failures, record_failure, spawn, startup_folder, when_imported

if TYPE_CHECKING:
    from zerodrift.inspect.check.table import RunFinding

END = "end"  # a file that lets every process end
HELD = "held"  # a file that is locked while the check runs

_STRAGGLING = 60.0  # seconds between the first rank that has seen its steps and the last
_GRACE = 10.0  # seconds between asking processes to end and killing them
_LONGEST_WAIT = 120.0  # seconds that a process waits for the others


@dataclass
class RunRecord:
    """The records of a command's processes: of those that took a step, by rank, and of the idle ones."""

    code: int  # exit code of the command; negative for a signal, 0 if the check ended it
    processes: list[ProcessRecord]
    idle: list[ProcessRecord]
    failures: list[str]  # why processes could not be watched
    silent: int  # watched processes that left nothing
    late: bool  # whether the check ended the command because its time was over


def run(
    command: Sequence[str],
    steps: int,
    keep_going: bool = False,
    stdout: int | None = None,
    timeout: float | None = None,
) -> RunRecord:
    """Run the command, and return when its processes have ended or `timeout` seconds are over."""
    hook = StartupHook(__name__, "watch_with_torch", (steps, keep_going))
    with startup_folder(hook, "zerodrift-check-") as folder:
        seen = folder / "seen"
        seen.mkdir()
        with locked(seen / HELD), _signals_end_it():
            child = spawn(command, folder, stdout, new_session=True)
            try:
                code = _wait(child, seen, keep_going, timeout)
            finally:
                _end(child)
        records = _records(seen)
        stepped = sorted((record for record in records if record.steps), key=lambda record: record.rank)
        together = [record for record in stepped if record.world > 1] or stepped
        idle = [record for record in records if not record.steps]
        began, written = ({path.stem for path in seen.glob(end)} for end in ("*.began", "*.json"))
        silent = len(began - written)
        return RunRecord(code or 0, together, idle, failures(folder), silent, late=code is None)


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Turn signals that end this process into an exit, which ends the command too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen[bytes], seen: Path, keep_going: bool, timeout: float | None) -> int | None:
    """Wait until the command ends or all of its ranks have seen their steps; return None for a timeout."""
    first: float | None = None
    until = time.monotonic() + (math.inf if timeout is None else timeout)
    while child.poll() is None:
        if time.monotonic() > until:
            return None
        time.sleep(0.1)
        done = [] if keep_going else [record for record in _records(seen) if record.ended == "steps"]
        if not done:
            continue
        first = first or time.monotonic()
        if len(done) >= max(record.world for record in done) or time.monotonic() - first > _STRAGGLING:
            (seen / END).touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE)
            _end(child)
            return 0
    return child.returncode


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask every process of the command that is still there to end, then kill it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE)
        if number is signal.SIGTERM:
            time.sleep(0.2)
    child.wait()


def _records(seen: Path) -> list[ProcessRecord]:
    return [ProcessRecord.from_json(json.loads(path.read_text())) for path in sorted(seen.glob("*.json"))]


def watch_with_torch(folder: str, steps: int, keep_going: bool) -> None:
    def begin(torch: ModuleType) -> None:
        try:
            _begin(Path(folder) / "seen", steps, keep_going)
        except Exception as error:
            record_failure(folder, error)

    when_imported("torch", begin)


def _begin(seen: Path, steps: int, keep_going: bool) -> None:
    """Watch so many optimizer steps in this process and, once it trains, in each that it forks."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook

    leave = [_watch(seen, steps, keep_going).end]

    def forked() -> None:
        """Wait for a forward with gradients on: most forked processes load data."""
        leave.pop()()
        leave.append(register_module_forward_pre_hook(first).remove)

    def first(module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            leave.pop()()
            watcher = _watch(seen, steps, keep_going)
            leave.append(watcher.end)
            watcher.forwards.begins(module, args)

    os.register_at_fork(after_in_child=forked)


def _watch(seen: Path, steps: int, keep_going: bool) -> Any:
    """Begin a `Watcher` that writes its record when it has seen its steps, or when the process ends."""
    import multiprocessing.util

    from zerodrift.inspect.trace import Watcher

    pid = os.getpid()
    path = seen / f"{pid}.json"

    def finished(process: ProcessRecord) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(process.to_json()))
        part.rename(path)
        if process.ended == "steps" and not keep_going:
            _wait_for_others(seen)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the script may have closed or replaced it
                    stream.flush()
            os._exit(0)

    def at_exit() -> None:
        if os.getpid() == pid:
            if not watcher.ended:
                watcher.finish("crash" if getattr(sys, "last_value", None) is not None else "exit")
            watcher.files_end()

    watcher = Watcher(steps, finished, files_after=keep_going)
    path.with_suffix(".began").touch()
    atexit.register(at_exit)
    # A process that `multiprocessing` has forked leaves by `os._exit`, after these.
    multiprocessing.util.Finalize(None, at_exit, exitpriority=0)
    return watcher


def _wait_for_others(seen: Path) -> None:
    """Stay until the check ends: other ranks may still need this process."""
    until = time.monotonic() + _LONGEST_WAIT
    while not (seen / END).exists() and is_locked(seen / HELD) and time.monotonic() < until:
        time.sleep(0.05)


# --- a loop of this process -----------------------------------------------------------------------------

_FOREVER = 1 << 62


class Observation:
    """The record of this process; complete when the context has ended."""

    def __init__(self) -> None:
        self._process: ProcessRecord | None = None

    @property
    def process(self) -> ProcessRecord:
        """The whole record."""
        if self._process is None:
            raise ZerodriftError("observe", "must have ended", do="Read the result after the `with`.")
        return self._process

    @property
    def models(self) -> list[ModelRecord]:
        """Every model that was watched, with its parameters."""
        return self.process.models

    def findings(self) -> list[RunFinding]:
        """Return what costs precision in this process."""
        from zerodrift.inspect.check.findings import run_findings

        return run_findings([self.process])

    def table(self) -> str:
        """Return the text that `check` prints for a run."""
        from zerodrift.inspect.check.report import run_text

        return run_text([self.process], self.findings(), (), color=False)


@contextlib.contextmanager
def observe(model: Any = None, optimizer: Any = None) -> Iterator[Observation]:
    """Watch what trains in this process until the context ends; values are what they would be without.

    `model` is the module, wrapped or not; without one, every model that trains is watched. `optimizer` must
    be one whose steps can be watched.
    """
    import torch

    from zerodrift.inspect.trace import Watcher

    held = getattr(optimizer, "optimizer", optimizer)
    if optimizer is not None and not isinstance(held, torch.optim.Optimizer):
        must = "must be a `torch.optim.Optimizer`, or wrap one as `optimizer.optimizer`"
        do = "Steps of other optimizers cannot be watched."
        raise ZerodriftError("optimizer", must, got=type(optimizer).__name__, do=do)
    observation = Observation()
    watcher = Watcher(_FOREVER, lambda process: None, only=model)
    try:
        yield observation
    finally:
        watcher.finish("steps")
        observation._process = watcher.state.process
    if not observation.models:
        must = "must see the model's forward, with gradients on"
        raise ModelError("observe", must, got="none", do="Train at least one step of it inside the `with`.")
