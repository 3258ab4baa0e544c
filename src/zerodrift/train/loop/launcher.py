"""Processes for ranks: one here, several here, or one of many that somebody else started.

Where a launcher's variables are (torchrun's, or those of a SLURM step) this process is a rank and joins.
Else there is a process per device of this machine, and this one watches over them: it passes signals on,
shows what the first rank to fail said, once, and leaves no process behind.

Invariant: when `launch` returns, none of its processes is alive; if this process dies, they end by
themselves.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from zerodrift.errors import ZerodriftError
from zerodrift.io.paths import free
from zerodrift.train.loop import signals as stopping
from zerodrift.train.loop.signals import IN_ORDER, SIGNALS

GRACE = 20.0
"""Seconds that the others have to end by themselves after one has failed."""


def join() -> bool:
    """Whether somebody else started this process as a rank. torchrun's variables are what `comm/mesh.py`
    reads; those of SLURM are translated into them here."""
    os.environ.update(slurm(os.environ) or {})
    return "RANK" in os.environ


def joined_ranks() -> int:
    """How many there are, where `join` says that there are some."""
    return int(os.environ["WORLD_SIZE"])


def slurm(environment: Mapping[str, str]) -> dict[str, str] | None:
    """torchrun's variables for a task of a SLURM step; None outside of one."""
    names = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    if "RANK" in environment or any(name not in environment for name in names):
        return None
    if int(environment["SLURM_NTASKS"]) < 2:
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
    """The first of a SLURM node list: of `gpu[03-05,9]-ib,login` it is `gpu03-ib`."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    return "" if match is None else "".join(part or "" for part in match.groups())


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asked for beside the job."""

    command: str = ""
    """As it was typed."""
    whole_plan: bool = False
    """Print every parameter's dtypes before the first step."""
    launched: bool = False
    """Whether a launcher of ours has started the rank, and tells of signals that come before it listens."""
    evaluation: bool = False
    """Evaluate a checkpoint, and train nothing."""


NOTHING = Asked()


@dataclass(frozen=True, slots=True)
class RankArguments:
    """What a rank is told: on its command line, as JSON."""

    source: str
    """The job file."""
    overrides: tuple[str, ...]
    failure: str
    """Where to write what went wrong."""
    watch: int
    """A pipe that closes when the launcher ends."""
    debug: bool
    asked: Asked
    replay: dict[str, Any] | None = None
    """What is asked of a rank that replays steps; see `replay.py`."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RankArguments:
        values = json.loads(text)
        read = {"overrides": tuple(values["overrides"]), "asked": Asked(**values["asked"])}
        return cls(**{**values, **read})


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank says of its end."""

    when: float
    """One clock for all ranks: the first failure is the cause of the others."""
    message: str
    refused: bool
    """Whether zerodrift said no, or the program has a defect."""


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    failure: Path
    log: Path


class Launcher:
    """The ranks of this machine, from their start to their end."""

    def __init__(
        self,
        source: str,
        overrides: Sequence[str],
        count: int,
        logs: Path,
        debug: bool,
        *,
        asked: Asked = NOTHING,
        threads: int | None = None,
        replay: dict[str, Any] | None = None,
    ) -> None:
        """`threads` of each rank; by default what the environment says, else its share of the processors."""
        self._logs = logs
        self._count = count
        self._asked: list[int] = []
        """Signals that were passed on."""
        self._read, self._write = os.pipe()
        port = str(_free_port())
        logs.mkdir(parents=True, exist_ok=True)
        self._ranks: list[_Rank] = []
        for number in range(count):
            failure, log = logs / f"rank-{number}.failure", logs / f"rank-{number}.txt"
            failure.unlink(missing_ok=True)
            work = RankArguments(
                source,
                tuple(overrides),
                str(failure),
                self._read,
                debug,
                replace(asked, launched=True),
                replay,
            )
            environment = {
                **os.environ,
                "RANK": str(number),
                "WORLD_SIZE": str(count),
                "LOCAL_RANK": str(number),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": str(threads or os.environ.get("OMP_NUM_THREADS") or _threads(count)),
            }
            with log.open("wb") as errors:
                process = self._start(number, work, environment, errors)
            self._ranks.append(_Rank(number, process, failure, log))
        os.close(self._read)

    def _start(
        self, number: int, work: RankArguments, environment: dict[str, str], errors: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches the launcher alone, which passes it on once.
        return subprocess.Popen(
            [sys.executable, "-m", "zerodrift.train.loop.rank", work.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=None if number == 0 else errors,
            stderr=errors,
            env=environment,
            pass_fds=(self._read,),
            start_new_session=True,
        )

    def wait(self) -> int:
        """Until all have ended: 0, 128 and the number of a signal that ended it, or what the first failure
        means."""
        before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._watch()
        finally:
            for rank in self._ranks:
                if rank.process.poll() is None:
                    rank.process.kill()
                rank.process.wait()
            os.close(self._write)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> int:
        deadline: float | None = None
        while any(rank.process.poll() is None for rank in self._ranks):
            if deadline is None and any(map(_ended_alone, self._ranks)):
                deadline = time.monotonic() + GRACE
                if not self._asked:
                    self._send(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.05)
        codes = [rank.process.returncode for rank in self._ranks]
        if not any(codes):
            return 0
        if len(self._asked) > 1:
            return 128 + self._asked[-1]
        asked = [code - IN_ORDER for code in codes if _is_in_order(code)]
        if len(asked) == len(codes):
            return 128 + (max(asked) or signal.SIGINT)
        if self._asked and {*codes} <= {128 + self._asked[0], -self._asked[0]}:
            stopping.tell(stopping.EARLY, self._asked[0])
            return 128 + self._asked[0]
        raise _first_failure([rank for rank in self._ranks if rank.process.returncode], self._count)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(number)
        if len(self._asked) == 2:
            stopping.tell(stopping.SECOND, number)
        self._send(signal.Signals(number) if len(self._asked) == 1 else signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.send_signal(number)


def _ended_alone(rank: _Rank) -> bool:
    """Whether a rank has ended otherwise than all do in the end."""
    code = rank.process.poll()
    return code not in (None, 0) and not _is_in_order(code)


def _is_in_order(code: int | None) -> bool:
    return code is not None and code - IN_ORDER in (0, *SIGNALS)


class RankFailedError(Exception):
    """A rank ended with a defect of the program, whose traceback was printed."""


def _first_failure(failed: Sequence[_Rank], count: int) -> Exception:
    """The error of the rank that failed first. One that was killed says nothing, and comes before those
    that only missed it."""
    silent = [rank for rank in failed if not rank.failure.is_file()]
    killed = [rank for rank in silent if rank.process.returncode in (-signal.SIGKILL, -signal.SIGSEGV)]
    failures = [(_failure(rank), rank) for rank in failed if rank.failure.is_file()]
    failures.sort(key=lambda pair: pair[0].when)
    if killed and all(failure.refused for failure, _ in failures):
        rank = killed[0]
        name = signal.Signals(-rank.process.returncode).name
        cause = "The system may have run out of memory. " if name == "SIGKILL" else ""
        return ZerodriftError(
            f"rank {rank.number}",
            f"all {count} ranks must live to the end",
            got=f"one that was ended by {name}",
            do=f"{cause}Start again to go on from the last checkpoint. What it printed is in {rank.log}.",
        )
    if failures:
        failure, rank = failures[0]
        if failure.refused:
            behind = f"rank {rank.number}: " if count > 1 else ""
            return ZerodriftError.relayed(f"{behind}{failure.message}")
        return RankFailedError(f"rank {rank.number} of {count}:\n{failure.message}")
    # Those that were told to end because of another say nothing of why.
    rank = next((each for each in failed if each.process.returncode != -signal.SIGTERM), failed[0])
    if rank.process.returncode == 2:  # it was refused something, and could not write what
        return ZerodriftError(
            rank.failure,
            "must be written where a rank is refused something",
            got=f"nothing of rank {rank.number}",
            do=f"{free(rank.failure)}Make room, or look into {rank.log}.",
        )
    tail = rank.log.read_text(errors="replace")[-4000:] if rank.log.is_file() else ""
    return RankFailedError(f"rank {rank.number} of {count} ended with {rank.process.returncode}:\n{tail}")


def _failure(rank: _Rank) -> Failure:
    return Failure(**json.loads(rank.failure.read_text()))


def write_failure(path: str, failure: Failure) -> None:
    """Called in the rank."""
    values: dict[str, Any] = {"when": failure.when, "message": failure.message, "refused": failure.refused}
    beside = Path(path).with_suffix(".writing")
    beside.write_text(json.dumps(values))
    beside.replace(path)


def _threads(count: int) -> int:
    """Of each rank, so that together they have as many as there are processors."""
    try:
        processors = len(os.sched_getaffinity(0))
    except AttributeError:
        processors = os.cpu_count() or 1
    return max(1, processors // count)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
