"""A run in this process: the one that `train` is, or a rank of several.

Invariant: whatever happens, the ranks have parted and the screen is in order when this returns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zerodrift.errors import ConfigError, ZerodriftError, refused_by_system
from zerodrift.io.paths import full_disk_named
from zerodrift.legible import legible
from zerodrift.train.display import display
from zerodrift.train.launch import Launcher, RankFailedError, join
from zerodrift.train.read import read_job
from zerodrift.train.stopping import listening

MOST = 1024
"""Processes that are started here: beyond any machine, and before it stands still."""


def train(source: str, overrides: Sequence[str] = (), nproc: int | None = None, debug: bool = False) -> int:
    """Do a job, here, as one of the ranks that somebody started, or in processes of our own; returns the
    exit code."""
    job, _ = read_job(source, overrides)
    if join():
        if nproc is not None or job.run.nproc is not None:
            print("zerodrift: `nproc` is not used: a launcher has started the ranks", file=sys.stderr)
        run_here(source, overrides)
        return 0
    count = nproc or job.run.nproc or _devices(job.run.device)
    if count == 1:
        run_here(source, overrides)
        return 0
    if count > MOST:
        must = f"must be at most {MOST:,} processes of one machine"
        raise ConfigError("--nproc" if nproc else "run.nproc", must, got=f"{count:,}")
    folder = Path(job.run.folder)
    with full_disk_named(folder):
        launcher = Launcher(source, overrides, count, folder / "logs", debug)
    try:
        return launcher.wait()
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1


def _devices(device: str) -> int:
    if device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def run_here(source: str, overrides: Sequence[str]) -> None:
    """One rank, from the job file to the last word."""
    from zerodrift.comm.mesh import started
    from zerodrift.train import nonfinite
    from zerodrift.train.loop import Loop
    from zerodrift.train.run import assemble

    job, config = read_job(source, overrides)
    rank, _ = started()
    show = display(rank, job.run.log_every)
    with system(), full_disk_named(Path(job.run.folder).expanduser()), listening() as stop:
        session = assemble(job, config, show)
        try:
            outcome = Loop(session, show, stop).run()
        except Exception as error:
            if nonfinite.is_out_of_memory(error):
                raise nonfinite.out_of_memory(
                    session.engine.plan, session.seat.micro, job.model.activation_checkpointing
                ) from error
            raise
        finally:
            session.engine.destroy()
        show.say(f"report: {legible(str(session.folder.report))}")
        if session.folder.export.is_dir() and not outcome.stopped and job.run.export:
            show.say(f"model: {legible(str(session.folder.export))}")


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
