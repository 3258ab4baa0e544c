"""Launch the ranks of a run on this machine, or join the ranks of another launcher.

A process with the variables of torchrun or of a SLURM step is a rank. Otherwise it launches one process per
device of this machine. It passes signals on, prints the error of the first rank to fail, and leaves no
process behind. The processes end when their launcher dies.

After the first SIGINT or SIGTERM the loop finishes its step and saves a checkpoint. A second signal, or one
before the first step, ends the run at once. The exit code is 128 plus the number of the signal, 130 for
Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from zerodrift import errors
from zerodrift.checkpoint import free
from zerodrift.errors import Problem, ZerodriftError

SIGNALS = (signal.SIGINT, signal.SIGTERM)

IN_ORDER = 64
"""Exit code of a rank that stopped cleanly, plus the number of its signal.

The number is 0 if another rank got the signal."""

STEP = "finishing this step, then saving"
END = "the run is ending: finishing its files"
FIRST = "{name}: {what}\n{name} again: stop at once, without saving"
SECOND = "{name}: stopped at once, without saving\nstart again to resume from the last checkpoint"
EARLY = "{name}: stopped before the first step, with nothing to save"


def exit_code(name: str) -> int:
    """Return the exit code of a run that a signal ended; that of Ctrl-C if another machine got it."""
    return 128 + signal.Signals[name if name in signal.Signals.__members__ else "SIGINT"]


def signal_name(name: str) -> str:
    return {"SIGINT": "Ctrl-C"}.get(name, name)


def announce(text: str, number: int, what: str = STEP) -> None:
    """Print from a signal handler, which may have interrupted a print, below the live line."""
    line = text.format(name=signal_name(signal.Signals(number).name), what=what)
    with contextlib.suppress(OSError):
        os.write(1, f"{os.linesep if os.isatty(1) else ''}{line}{os.linesep}".encode())


class Stop:
    def __init__(self, prints: bool = True, launched: bool = False) -> None:
        """A `launched` rank leaves signals before the first step to its launcher."""
        self.asked = False
        self.by = ""
        self.doing = ""
        """The work that a signal waits for; empty before the first step."""
        self._prints, self._launched = prints, launched

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        self.by = signal.Signals(number).name
        if not self.doing:
            if not self._launched:
                self._announce(EARLY, number)
            # Not SystemExit: that of a model's own code is an error of the model.
            raise KeyboardInterrupt
        if self.asked:
            self._announce(SECOND, number)
            # A normal exit would wait for threads of torch and gloo.
            os._exit(128 + number)
        self._announce(FIRST, number)
        self.asked = True

    def _announce(self, text: str, number: int) -> None:
        if self._prints:
            announce(text, number, self.doing)


@contextlib.contextmanager
def listen(prints: bool = True, launched: bool = False) -> Iterator[Stop]:
    """Send signals to the `Stop` that is yielded, and restore their handlers at the end."""
    stop = Stop(prints, launched)
    try:
        with _signals_to(stop.ask):
            yield stop
    except KeyboardInterrupt:  # before the first step
        sys.exit(exit_code(stop.by))


@contextlib.contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


# --- ranks ----------------------------------------------------------------------------------------------


GRACE = 20.0
"""Seconds that the other ranks have to end after one has failed."""


def join() -> int:
    """Return the number of ranks of another launcher that started this process; 0 without one.

    SLURM's variables are translated into torchrun's.
    """
    from zerodrift.comm import started  # imports torch

    os.environ.update(slurm(os.environ) or {})
    return started()[1] if "RANK" in os.environ else 0


def slurm(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return torchrun's variables for a task of a SLURM step; None outside of one."""
    names = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    if "RANK" in environment or any(name not in environment for name in names):
        return None
    if environment["SLURM_NTASKS"] == "1":
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    job = int(environment.get("SLURM_JOB_ID", "0"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20_000 + job % 20_000),
    }


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: `gpu[03-05,9]-ib,login` -> `gpu03-ib`."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    return "" if match is None else "".join(part or "" for part in match.groups())


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The work of a rank."""

    source: str
    """A job file, or the folder of a run."""
    overrides: Sequence[str] = ()
    debug: bool = False
    """Print the traceback of a refusal."""
    command: str = ""
    """The command as it was typed."""
    whole_plan: bool = False
    """Print every parameter's dtypes before the first step."""
    launched: bool = False
    """Whether our launcher started the rank, and announces signals before the first step."""
    evaluation: bool = False
    """Evaluate a checkpoint, and train nothing."""
    replay: dict[str, Any] | None = None
    """Arguments of `replay_here`, to replay steps of a run instead."""


def write_failure(path: str, message: str, refusal: ZerodriftError | None, when: float) -> None:
    """Write the error of a rank.

    The first error by `when`, on the clock of all ranks, is taken as the cause of the others. `refusal` is an
    error of zerodrift; None for a defect of the program.
    """
    failure: dict[str, Any] = {"when": when, "message": message, "refused": refusal is not None}
    if refusal is not None:
        failure |= {"kind": type(refusal).__name__, "problems": [astuple(each) for each in refusal.problems]}
    beside = Path(path).with_suffix(".writing")
    beside.write_text(json.dumps(failure))
    beside.replace(path)


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    failure: Path
    log: Path


class RankFailedError(Exception):
    """A rank ended with a defect of the program, whose traceback was printed."""


class Launcher:
    def __init__(self, request: LaunchRequest, count: int, logs: Path, threads: int | None = None) -> None:
        """`threads` of each rank; by default OMP_NUM_THREADS, else a share of the processors."""
        self._count = count
        self._asked: list[int] = []
        """Signals that were passed on."""
        self._failed: list[_Rank] = []
        """Ranks that failed, in order. Ranks that were ended because of another one come last."""
        self._read, self._write = os.pipe()
        logs.mkdir(parents=True, exist_ok=True)
        threads_of_rank = threads or os.environ.get("OMP_NUM_THREADS") or _threads(count)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common = {**os.environ, **place, "OMP_NUM_THREADS": str(threads_of_rank)}
        # A rank ends when the pipe `watch` closes, as it does when the launcher ends.
        arguments = {"request": asdict(replace(request, launched=True)), "watch": self._read}
        self._ranks: list[_Rank] = []
        for number in range(count):
            failure, log = logs / f"rank-{number}.failure", logs / f"rank-{number}.txt"
            failure.unlink(missing_ok=True)
            work = json.dumps({**arguments, "failure": str(failure)})
            environment = {**common, "RANK": str(number), "LOCAL_RANK": str(number)}
            with log.open("wb") as errors:
                process = self._start(number, work, environment, errors)
            self._ranks.append(_Rank(number, process, failure, log))
        os.close(self._read)

    def _start(
        self, number: int, work: str, environment: dict[str, str], errors: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        # In a new session, so that only the launcher gets Ctrl-C, and passes it on once.
        return subprocess.Popen(
            [sys.executable, "-m", "zerodrift.train.loop.start", work],
            stdin=subprocess.DEVNULL,
            stdout=None if number == 0 else errors,
            stderr=errors,
            env=environment,
            pass_fds=(self._read,),
            start_new_session=True,
        )

    def wait(self) -> int:
        """Wait for all ranks; return 0, or 128 and the number of a signal; raise the first failure."""
        with _signals_to(self._pass_on):
            try:
                return self._watch()
            finally:
                for rank in self._ranks:
                    if rank.process.poll() is None:
                        rank.process.kill()
                    rank.process.wait()
                os.close(self._write)

    def _watch(self) -> int:
        deadline: float | None = None
        while any(rank.process.poll() is None for rank in self._ranks):
            self._see_failures()
            if deadline is None and self._failed:
                deadline = time.monotonic() + GRACE
                if not self._asked:
                    self._send(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.05)
        self._see_failures()
        codes = [rank.process.returncode for rank in self._ranks]
        if not any(codes):
            return 0
        if len(self._asked) > 1:
            return 128 + self._asked[-1]
        in_order = [code - IN_ORDER for code in codes if _is_in_order(code)]
        if len(in_order) == len(codes):
            return 128 + (max(in_order) or signal.SIGINT)
        if self._asked and {*codes} <= {128 + self._asked[0], -self._asked[0]}:
            announce(EARLY, self._asked[0])
            return 128 + self._asked[0]
        in_order_too = [rank for rank in self._ranks if rank.process.returncode and rank not in self._failed]
        raise _first_failure([*self._failed, *in_order_too], self._count)

    def _see_failures(self) -> None:
        for rank in self._ranks:
            code = rank.process.poll() or 0
            if code and not _is_in_order(code) and rank not in self._failed:
                self._failed.append(rank)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(number)
        if len(self._asked) == 2:
            announce(SECOND, number)
        self._send(signal.Signals(number) if len(self._asked) == 1 else signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.send_signal(number)


def _is_in_order(code: int) -> bool:
    return code - IN_ORDER in (0, *SIGNALS)


def _first_failure(failed: Sequence[_Rank], count: int) -> Exception:
    """Return the error of the rank that failed first.

    A killed rank writes no error. It comes before ranks whose refusals it may have caused.
    """
    failures = [(json.loads(rank.failure.read_text()), rank) for rank in failed if rank.failure.is_file()]
    failures.sort(key=lambda pair: pair[0]["when"])
    silent = [rank for rank in failed if not rank.failure.is_file()]
    killed = [rank for rank in silent if rank.process.returncode in (-signal.SIGKILL, -signal.SIGSEGV)]
    if killed and all(failure["refused"] for failure, _ in failures):
        rank = killed[0]
        name = signal.Signals(-rank.process.returncode).name
        cause = "The system may have run out of memory. " if name == "SIGKILL" else ""
        todo = f"{cause}Start again to resume from the last checkpoint. The rank's output is in {rank.log}."
        must, got = f"all {count} ranks must run to the end", f"one that was ended by {name}"
        return ZerodriftError(f"rank {rank.number}", must, got=got, do=todo)
    if failures:
        failure, rank = failures[0]
        if failure["refused"]:
            prefix = f"rank {rank.number}: " if count > 1 else ""
            kind = getattr(errors, failure["kind"], ZerodriftError)
            parts = failure["problems"]
            problems = [Problem(where, must, got=got, do=todo) for where, must, got, todo in parts]
            relayed: ZerodriftError = kind.relayed(f"{prefix}{failure['message']}", problems)
            return relayed
        return RankFailedError(f"rank {rank.number} of {count}:\n{failure['message']}")
    # Ranks that were ended because of another one have no error of their own.
    rank = next((each for each in failed if each.process.returncode != -signal.SIGTERM), failed[0])
    if rank.process.returncode == 2:  # the error of a refusal could not be written
        must, got = "must have the error of a rank", f"nothing of rank {rank.number}"
        todo = f"{free(rank.failure)}Make room, or look into {rank.log}."
        return ZerodriftError(rank.failure, must, got=got, do=todo)
    tail = rank.log.read_text(errors="replace")[-4000:] if rank.log.is_file() else ""
    return RankFailedError(f"rank {rank.number} of {count} ended with {rank.process.returncode}:\n{tail}")


def _threads(count: int) -> int:
    try:
        processors = len(os.sched_getaffinity(0))
    except AttributeError:
        processors = os.cpu_count() or 1
    return max(1, processors // count)
