"""A run in this process: the one that `train` is, or a rank of several.

Invariant: whatever happens, the ranks have parted and the screen is in order when this returns.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zerodrift.errors import ConfigError, ZerodriftError, refused_by_system
from zerodrift.io.paths import full_disk_named
from zerodrift.legible import legible
from zerodrift.train.loop.job import Job
from zerodrift.train.loop.job_file import read_job
from zerodrift.train.loop.launcher import NOTHING, Asked, Launcher, RankFailedError, join, joined_ranks
from zerodrift.train.loop.run_folder import RunFolder, require_writable
from zerodrift.train.loop.signals import exit_code, listening
from zerodrift.train.loop.wording import worded_for_a_job
from zerodrift.train.report.live import display

MOST = 1024
"""Processes that are started here: beyond any machine, and before it stands still."""


def train(
    source: str,
    overrides: Sequence[str] = (),
    nproc: int | None = None,
    debug: bool = False,
    whole_plan: bool = False,
) -> int:
    """Do a job, here, as one of the ranks that somebody started, or in processes of our own; returns the
    exit code."""
    job, _ = read_job(source, overrides)
    asked = Asked(_command(source, overrides, nproc), whole_plan)
    if join():
        if nproc is not None or job.run.nproc is not None:
            print("zerodrift: `nproc` is not used: a launcher has started the ranks", file=sys.stderr)
        return run_here(source, overrides, asked)
    count = processes(job, nproc)
    if count == 1:
        return run_here(source, overrides, asked)
    return _launched(source, overrides, count, RunFolder(Path(job.run.folder).expanduser()), debug, asked)


def _launched(
    source: str, overrides: Sequence[str], count: int, folder: RunFolder, debug: bool, asked: Asked
) -> int:
    require_writable("run.folder", folder.path)
    with full_disk_named(folder.path):
        launcher = Launcher(source, overrides, count, folder.logs, debug, asked=asked)
    try:
        return launcher.wait()
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1


def evaluate(
    source: str, overrides: Sequence[str] = (), nproc: int | None = None, debug: bool = False
) -> int:
    """Say what training would of its newest checkpoint, or of the one that `run.resume` names; returns the
    exit code. Nothing is trained, and the run is left as it is."""
    from zerodrift.train.loop.evaluation import apart

    job, _ = read_job(source, overrides)
    asked = Asked(_command(source, overrides, nproc, "evaluate"), evaluation=True)
    joined = join()
    with system(), worded_for_a_job():
        overrides = apart(job, overrides)
    count = 1 if joined else processes(job, nproc)
    if joined or count == 1:
        return run_here(source, overrides, asked)
    folder = RunFolder(Path(job.run.folder).expanduser()).evaluation
    return _launched(source, overrides, count, RunFolder(folder), debug, asked)


def dry_run(source: str, overrides: Sequence[str], nproc: int | None, whole_plan: bool) -> None:
    """Say what `train` would, up to its first step."""
    from zerodrift.train.tools.dry_run import dry_run as run

    job, _ = read_job(source, overrides)
    ranks = joined_ranks() if join() else processes(job, nproc)
    with system(), worded_for_a_job():
        run(source, overrides, ranks, whole_plan)


def processes(job: Job, nproc: int | None) -> int:
    """How many to start."""
    count = nproc or job.run.nproc or _devices(job.run.device)
    if count > MOST:
        must = f"must be at most {MOST:,} processes of one machine"
        raise ConfigError("--nproc" if nproc else "run.nproc", must, got=f"{count:,}")
    return count


def _command(source: str, overrides: Sequence[str], nproc: int | None, verb: str = "train") -> str:
    """What a person types to start this again."""
    sets = [word for text in overrides for word in ("--set", text)]
    count = ["--nproc", str(nproc)] if nproc else []
    return shlex.join(["zerodrift", verb, str(source), *sets, *count])


def _devices(device: str) -> int:
    if device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def run_here(source: str, overrides: Sequence[str], asked: Asked = NOTHING) -> int:
    """One rank, from the job file to the last word; returns the exit code."""
    from zerodrift.comm.mesh import started
    from zerodrift.train.loop import nonfinite
    from zerodrift.train.loop.evaluation import evaluate_here
    from zerodrift.train.loop.session import assemble
    from zerodrift.train.loop.training import Loop

    job, config = read_job(source, overrides)
    rank, _ = started()
    show = display(rank, job.run.log_every)
    folder = RunFolder(Path(job.run.folder).expanduser())
    told = full_disk_named(folder.path)
    with system(), worded_for_a_job(), told, listening(rank == 0, asked.launched) as stop:
        try:
            session = assemble(job, config, show, asked)
        except BaseException:
            show.stop()
            raise
        try:
            if asked.evaluation:
                evaluate_here(job, session, show)
                return 0
            outcome = Loop(session, show, stop).run()
        except Exception as error:
            if nonfinite.is_out_of_memory(error):
                raise nonfinite.out_of_memory(
                    session.engine.plan, session.seat.micro, job.model.activation_checkpointing
                ) from error
            raise
        finally:
            show.stop()
            session.close()
        show.say(f"report: {legible(str(session.folder.report))}")
        if session.folder.export.is_dir() and not outcome.stopped and job.run.export:
            show.say(f"model: {legible(str(session.folder.export))}")
        return exit_code(outcome.stopped) if outcome.stopped else 0


@contextmanager
def system() -> Iterator[None]:
    """A file that cannot be used is refused by its name, and so is a stdout that nobody reads any more."""
    try:
        yield
    except BrokenPipeError as error:
        # Python flushes stdout once more at exit; let it have something to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        must, todo = "must stay open while a run prints", "Start again to go on from the last checkpoint."
        raise ZerodriftError("stdout", must, got="nobody who reads it", do=todo) from error
    except OSError as error:
        refused = refused_by_system(error)
        if refused is None:
            raise
        raise refused from error
