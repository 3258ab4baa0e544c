"""Run a function on several ranks: a process each, gloo between them, results and failures back here.

`run_ranks(function, world_size, *args)` forks the ranks from a server that has torch imported, so a rank
costs a tenth of a second. The function runs with the default process group initialised; `comm.mesh.start`
builds on it. Seeds and comparisons are left to the test. `on_ranks(world_size)` makes a test whose body is
that function.

A first engine in a new process costs as much again as one after it. `kept_ranks()` keeps ranks that have
answered for the next call, which has a process group of its own; except where a function has left an engine,
or another process group. `tests/conftest.py` does so for the tests of one file.

Invariant: when `run_ranks` returns or raises, none of its processes is alive but those that are kept, which
all have answered; and should this process die, they end by themselves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
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
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]

PRELOAD = ["tests.ranks.preload", __name__]
"""Modules that are imported once, before the ranks are forked."""

GRACE = 0.5
"""Seconds in which hung ranks write their stacks."""


class RankFailure(AssertionError):  # noqa: N818 (a failed test, not an error of the code)
    """A rank raised, died or hung; the text has its traceback and output."""


@dataclass(frozen=True)
class _Work:
    """A call for one rank."""

    rank: int
    world_size: int
    folder: Path
    call: bytes
    """The pickled function and arguments."""
    timeout: float


@dataclass(frozen=True)
class _Outcome:
    """The answer of a rank."""

    ok: bool
    value: Any
    """The result, or the traceback."""
    when: float
    """Monotonic time, one clock for all ranks: the first failure is the cause of the others."""
    left: bool = True
    """Whether process groups of the function are left, and what they wait for."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    dying: Collection[int] = (),
) -> list[Any]:
    """Run `function(*args)` on every rank, and return the results in rank order. A runner in `instead` may
    take over.

    The function must be importable, its arguments and results picklable. A rank in `dying` is meant to end
    without an answer and counts as None. Anything else that is not a result raises RankFailure, within
    `timeout` seconds.
    """
    if instead:
        return instead[-1](function, world_size, *args, timeout=4 * timeout, dying=dying)
    return run_here(function, world_size, *args, timeout=timeout, dying=dying)


def run_here(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float,
    dying: Collection[int] = (),
    kind: str = "",
) -> list[Any]:
    """Run like `run_ranks`, on ranks of the CPU. Those of one `kind` are kept for each other's calls,
    because a function may change its process for good."""
    # Pickled by hand: multiprocessing would share the memory of tensors with a process that may be gone.
    call = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        ranks = []
        try:
            for number in range(world_size):
                kept = _waiting[kind]
                ranks.append(kept.pop() if kept and not dying else _start())
                ranks[-1].begin(_Work(number, world_size, Path(name), call, timeout))
            answers = _gather(ranks, function.__qualname__, time.monotonic() + timeout, dying)
            left = any(rank.outcome is None or rank.outcome.left for rank in ranks)
            if _keeping and not dying and not left:
                # The first one asked for is the first one given.
                _waiting[kind].extend(reversed(ranks))
                ranks = []
            return answers
        finally:
            for rank in ranks:
                rank.end()


def destroy_at_the_end(engine: Any) -> Any:
    """Destroy an engine when the function that this rank runs has ended; elsewhere its caller must."""
    if _engines is None:
        return engine
    made, engines = weakref.ref(engine), _engines

    def destroy() -> None:
        if (known := made()) in engines:
            engines.remove(known)
        type(known).destroy(known)

    engine.destroy = destroy
    engines.append(engine)
    return engine


def destroy_engines() -> None:
    while _engines:
        _engines[0].destroy()


Test = Callable[..., Any]


def on_ranks(world_size: int | str = "world", timeout: float = 60.0) -> Callable[[Test], Test]:
    """Make a test run on each of so many ranks. It fails if one rank raises, or returns findings.

    The number may be the name of a parameter. Asserts need their own messages, since pytest rewrites none
    there.
    """

    def made(test: Test) -> Test:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            ranks = given[world_size] if isinstance(world_size, str) else world_size
            found = run_ranks(_run_test, ranks, test.__module__, test.__name__, given, timeout=timeout)
            assert not any(found), found

        return run

    return made


def _run_test(module: str, name: str, given: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(module), name).__wrapped__(**given)


@contextlib.contextmanager
def kept_ranks() -> Iterator[None]:
    """Keep clean ranks for the next calls until the end of the context."""
    _keeping.append(True)
    try:
        yield
    finally:
        _keeping.pop()
        for waiting in _waiting.values():
            while waiting:
                waiting.pop().end()


def kept_processes() -> set[BaseProcess]:
    """Return the processes of ranks that wait for another call."""
    return {rank.process for waiting in _waiting.values() for rank in waiting}


def forks() -> multiprocessing.context.ForkServerContext:
    """Return a context whose processes begin with everything imported.

    A server finds `tests` from the folder that it starts in, and skips modules that it cannot import:
    started by a test in a folder of its own, it would have nothing, and every process would import it all.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(ROOT)
        forkserver.ensure_running()
    finally:
        os.fchdir(here)
        os.close(here)
    return context


def redirect(out: Path, err: Path) -> None:
    """Send the output of this process, from Python or below, to files, or in its order to one."""
    assert PRELOAD[0] in sys.modules, "the server that forks processes has not imported what they need"
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)


@dataclass
class _Rank:
    """A rank's process with its pipe."""

    process: BaseProcess
    pipe: Connection
    number: int = 0
    log: Path = Path()
    outcome: _Outcome | None = None
    closed: bool = False

    def begin(self, work: _Work) -> None:
        self.number, self.log, self.outcome = work.rank, work.folder / f"{work.rank}.log", None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody answers: that tells it
            self.pipe.send_bytes(pickle.dumps(work))

    def listen(self) -> None:
        try:
            self.outcome = pickle.loads(self.pipe.recv_bytes())
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
        self.pipe.close()


_engines: list[Any] | None = None
"""Engines that the function of this rank has made; None outside of ranks."""
instead: list[Callable[..., list[Any]]] = []
"""Runners on ranks, the last of which `run_ranks` uses; the CPU's without any."""
_keeping: list[bool] = []
_waiting: dict[str, list[_Rank]] = defaultdict(list)
"""Kept ranks, by kind."""


def _start() -> _Rank:
    context = forks()
    ours, theirs = context.Pipe()
    process = context.Process(target=_rank, args=(theirs,), name="rank", daemon=True)
    process.start()
    theirs.close()
    return _Rank(process, ours)


def _gather(ranks: list[_Rank], what: str, deadline: float, dying: Collection[int]) -> list[Any]:
    where = f"of {len(ranks)} in `{what}`"
    while waiting := [rank for rank in ranks if not rank.done]:
        ready = wait([rank.pipe for rank in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(_hang(waiting, where))
        for rank in waiting:
            if rank.pipe in ready:
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
    """Let the ranks without an answer write their stacks, and read them."""
    for rank in waiting:
        if rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(GRACE)
    names = ", ".join(str(rank.number) for rank in waiting)
    return f"ranks {names} {where} did not answer in time" + "".join(rank.output() for rank in waiting)


def _rank(pipe: Connection) -> None:
    """Answer calls until the pipe is closed: the main function of a rank."""
    global _engines
    _engines = []
    _die_with_parent()
    torch.set_num_threads(1)
    folder, environment, random = os.getcwd(), dict(os.environ), torch.get_rng_state()
    while True:
        work = pickle.loads(pipe.recv_bytes())
        # Only now: the others may have been talking to this rank's threads until all had answered.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_rng_state(random)
        pipe.send_bytes(_answer(work))


def _answer(work: _Work) -> bytes:
    """Run one call and return its pickled outcome."""
    _capture(work)
    # Whatever hangs, in Python or below it, ends.
    faulthandler.dump_traceback_later(work.timeout + 10 * GRACE, exit=True)
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
        value = function(*args)
        destroy_engines()
        left = len(dist.distributed_c10d._world.pg_map) > 1
        answer = pickle.dumps(_Outcome(True, value, time.monotonic(), left))
    except BaseException:
        answer = pickle.dumps(_Outcome(False, traceback.format_exc(), time.monotonic()))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    return answer


def _capture(work: _Work) -> None:
    """Send the rank's output and stacks to a file of its own."""
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
