"""Run a function on several ranks: a process each, gloo between them, results and failures back here.

`run_ranks(function, world_size, *args)` forks the ranks from a server that has torch imported, so a rank
costs a tenth of a second. The function runs with the default process group initialised; `comm.mesh.start`
builds on it. What it leaves to the test: seeds, and what is compared.

Invariant: when `run_ranks` returns or raises, none of its processes is alive; and should this process
die, they end by themselves.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = ["tests.ranks.preload", __name__]
"""Imported once, before the ranks are forked."""

GRACE = 0.5
"""Seconds for the stacks of hung ranks to be written."""


class RankFailure(AssertionError):  # noqa: N818 (a failed test, not an error of the code)
    """A rank raised, died or hung; the text has its traceback and output."""


@dataclass(frozen=True)
class _Work:
    """What a rank is told."""

    rank: int
    world_size: int
    folder: Path
    call: bytes
    """The pickled function and arguments."""
    timeout: float


@dataclass(frozen=True)
class _Outcome:
    """What a rank answers."""

    ok: bool
    value: Any
    """The result, or the traceback."""
    when: float
    """Monotonic time, one clock for all ranks: the first failure is the cause of the others."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    dying: Collection[int] = (),
) -> list[Any]:
    """`function(*args)` on every rank; the results in rank order.

    The function must be importable, its arguments and results picklable. A rank in `dying` is meant to end
    without an answer and counts as None. Anything else that is not a result raises RankFailure, within
    `timeout` seconds.
    """
    # Pickled by hand: multiprocessing would share the memory of tensors with a process that may be gone.
    call = pickle.dumps((function, args))
    context = forks()
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        ranks = []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                work = _Work(rank, world_size, Path(name), call, timeout)
                process = context.Process(target=_rank, args=(sender, work), name=f"rank-{rank}", daemon=True)
                process.start()
                sender.close()
                ranks.append(_Rank(rank, process, receiver, Path(name) / f"{rank}.log"))
            return _gather(ranks, function.__qualname__, time.monotonic() + timeout, dying)
        finally:
            for rank_ in ranks:
                rank_.end()


def forks() -> multiprocessing.context.ForkServerContext:
    """Processes that begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def redirect(out: Path, err: Path) -> None:
    """What this process prints, in Python or below, goes to files, or in its order to one."""
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)


@dataclass
class _Rank:
    """A rank as its parent sees it."""

    number: int
    process: BaseProcess
    receiver: Connection
    log: Path
    outcome: _Outcome | None = None
    closed: bool = False

    def listen(self) -> None:
        try:
            self.outcome = pickle.loads(self.receiver.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.closed = True

    @property
    def done(self) -> bool:
        return self.outcome is not None or self.closed

    def output(self) -> str:
        text = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        return f"\n--- output of rank {self.number} ---\n{text[-6000:]}" if text else ""

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.receiver.close()


def _gather(ranks: list[_Rank], what: str, deadline: float, dying: Collection[int]) -> list[Any]:
    where = f"of {len(ranks)} in `{what}`"
    while waiting := [rank for rank in ranks if not rank.done]:
        ready = wait([rank.receiver for rank in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(_hang(waiting, where))
        for rank in waiting:
            if rank.receiver in ready:
                rank.listen()
        failed = [(rank.outcome.when, rank) for rank in ranks if rank.outcome and not rank.outcome.ok]
        if failed:
            _, first = min(failed, key=lambda pair: pair[0])
            assert first.outcome is not None
            raise RankFailure(f"rank {first.number} {where} raised\n{first.outcome.value}{first.output()}")
        for rank in waiting:
            if rank.closed and rank.number not in dying:
                rank.process.join(GRACE)
                code = rank.process.exitcode
                raise RankFailure(f"rank {rank.number} {where} died with exit code {code}{rank.output()}")
    return [rank.outcome.value if rank.outcome else None for rank in ranks]


def _hang(waiting: list[_Rank], where: str) -> str:
    """Make the ranks that did not answer write their stacks, and read them."""
    for rank in waiting:
        if rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(GRACE)
    names = ", ".join(str(rank.number) for rank in waiting)
    return f"ranks {names} {where} did not answer in time" + "".join(rank.output() for rank in waiting)


def _rank(sender: Connection, work: _Work) -> None:
    """The life of one rank."""
    _capture(work)
    _die_with_parent()
    # Whatever hangs, in Python or below it, ends.
    faulthandler.dump_traceback_later(work.timeout + 10 * GRACE, exit=True)
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(work.call)
        dist.init_process_group(
            "gloo",
            init_method=(work.folder / "store").as_uri(),
            rank=work.rank,
            world_size=work.world_size,
            timeout=timedelta(seconds=work.timeout),
        )
        dist.barrier()  # nobody leaves while another is still connecting
        answer = pickle.dumps(_Outcome(True, function(*args), time.monotonic()))
    except BaseException:
        answer = pickle.dumps(_Outcome(False, traceback.format_exc(), time.monotonic()))
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send_bytes(answer)
    # The others may still be talking to this rank's threads; the parent ends all when all have answered.
    threading.Event().wait()


def _capture(work: _Work) -> None:
    """Everything the rank prints, in Python or below, and its stacks, go to a file of its own."""
    log = work.folder / f"{work.rank}.log"
    redirect(log, log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()
