"""Start a run in this process, as a rank of another launcher, or in processes of our own; or do a dry run.

`Launcher` starts a rank as `python -m zerodrift.train.loop.start ARGUMENTS`.

At the end, also after an error, the process group is destroyed and the live display is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zerodrift.checkpoint import full_disk_named
from zerodrift.config import Config
from zerodrift.errors import ConfigError, ZerodriftError, refused_by_system
from zerodrift.legible import legible
from zerodrift.train.job import Job
from zerodrift.train.job_file import numbers_of, read_job
from zerodrift.train.loop.launcher import (
    IN_ORDER,
    Launcher,
    LaunchRequest,
    RankFailedError,
    exit_code,
    join,
    listen,
    write_failure,
)
from zerodrift.train.loop.run_folder import RunFolder, require_writable
from zerodrift.train.report.display import display

MOST = 1024
"""Most processes of one machine."""


def train(
    source: str,
    overrides: Sequence[str] = (),
    nproc: int | None = None,
    debug: bool = False,
    whole_plan: bool = False,
) -> int:
    """Run a job here, as a joined rank, or in processes of our own; return the exit code."""
    command = _command("train", source, overrides, nproc)
    return _run(LaunchRequest(source, overrides, debug, command, whole_plan), nproc)


def evaluate(
    source: str, overrides: Sequence[str] = (), nproc: int | None = None, debug: bool = False
) -> int:
    """Evaluate the newest checkpoint, or the one that `run.resume` names; return the exit code.

    Nothing is trained, and the run stays as it is.
    """
    command = _command("evaluate", source, overrides, nproc)
    return _run(LaunchRequest(source, overrides, debug, command, evaluation=True), nproc)


def dry_run(source: str, overrides: Sequence[str], nproc: int | None, whole_plan: bool) -> None:
    """Print what `train` would print before its first step. It writes only blocks of data, into the cache."""
    from zerodrift.api import make_plan
    from zerodrift.train.loop.resume import checkpoint_to_resume
    from zerodrift.train.loop.session import outline
    from zerodrift.train.report.summary import data_text, head_text

    job, config = read_job(source, overrides)
    ranks = join() or processes(job, config, nproc)
    show = display(0, job.run.log_every)
    folder = RunFolder.of(job).path
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        made, model = outline(job, config, show, ranks)
        plan = make_plan(config, model, ranks, auto=numbers_of(job, config, made.steps))
        show.say(head_text(plan, show, whole_plan))
        show.say(data_text(job, made.prepared, made.steps, plan, show))
        start = None if job.run.resume == "never" else checkpoint_to_resume(job.run.resume, made.folder)
        begins = "would begin anew" if start is None else f"would resume from {start}"
        show.say(legible(f"dry run: {begins}, in {made.folder.path}; nothing was started"))
    finally:
        show.stop()
        for place in new:  # made to check that they can be written
            with contextlib.suppress(OSError):
                place.rmdir()


def _run(request: LaunchRequest, nproc: int | None) -> int:
    from zerodrift.train.loop.evaluation import overrides_to_evaluate

    job, config = read_job(request.source, request.overrides)
    folder, is_joined = RunFolder.of(job), join() > 0
    if is_joined and (nproc is not None or job.run.nproc is not None):
        print("zerodrift: `nproc` is not used: a launcher has started the ranks", file=sys.stderr)
    if request.evaluation:
        request = replace(request, overrides=overrides_to_evaluate(job, request.overrides))
        folder = RunFolder(folder.evaluation)
    count = 1 if is_joined else processes(job, config, nproc)
    if count == 1:
        return run_here(request)
    require_writable("run.folder", folder.path)
    with full_disk_named(folder.path):
        launcher = Launcher(request, count, folder.logs)
    try:
        return launcher.wait()
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1


def processes(job: Job, config: Config, nproc: int | None) -> int:
    """Return how many processes to start, or refuse a config that does not fit this number of ranks."""
    from zerodrift.policy import mesh_for, resolve

    count = nproc or job.run.nproc
    if count is None and job.run.device != "cpu":
        import torch

        count = torch.accelerator.device_count()
    count = count or 1
    if count > MOST:
        must = f"must be at most {MOST:,} processes of one machine"
        raise ConfigError("--nproc" if nproc else "run.nproc", must, got=f"{count:,}")
    resolve(config, mesh_for(config, count), numbers_of(job, config, job.run.steps))
    return count


def _command(verb: str, source: str, overrides: Sequence[str], nproc: int | None) -> str:
    sets = [word for text in overrides for word in ("--set", text)]
    count = ["--nproc", str(nproc)] if nproc else []
    return shlex.join(["zerodrift", verb, str(source), *sets, *count])


def run_here(request: LaunchRequest) -> int:
    """Run one rank from the job file to the end; return the exit code."""
    from zerodrift.comm import started
    from zerodrift.train.loop.evaluation import evaluate_here
    from zerodrift.train.loop.session import assemble
    from zerodrift.train.loop.step import is_out_of_memory, out_of_memory
    from zerodrift.train.loop.training import Loop

    job, config = read_job(request.source, request.overrides)
    rank, _ = started()
    show = display(rank, job.run.log_every)
    full_disk = full_disk_named(RunFolder.of(job).path)
    with refused_files(), full_disk, listen(rank == 0, request.launched) as stop:
        session = None
        try:
            session = assemble(job, config, show, request.command, request.whole_plan)
            if request.evaluation:
                evaluate_here(session, show)
                return 0
            stopped = Loop(session, show, stop).run()
        except Exception as error:
            if session is not None and is_out_of_memory(error):
                plan, checkpointing = session.engine.plan, job.model.activation_checkpointing
                raise out_of_memory(plan, session.feed.layout.micro, checkpointing) from error
            raise
        finally:
            show.stop()
            if session is not None:
                session.close()
        folder = session.outline.folder
        show.say(f"report: {legible(str(folder.report))}")
        if folder.export.is_dir() and not stopped and job.run.export:
            show.say(f"model: {legible(str(folder.export))}")
        return exit_code(stopped) if stopped else 0


@contextlib.contextmanager
def refused_files() -> Iterator[None]:
    """Turn errors of the system, and a closed stdout, into refusals by name."""
    try:
        yield
    except BrokenPipeError as error:
        # Python flushes stdout once more at exit, which needs somewhere to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        must, todo = "must stay open while a run prints", "Start again to resume from the last checkpoint."
        raise ZerodriftError("stdout", must, got="nobody who reads it", do=todo) from error
    except OSError as error:
        refused = refused_by_system(error)
        if refused is None:
            raise
        raise refused from error


def main(text: str) -> int:
    """Run a rank with the arguments that `Launcher` writes as JSON; return its exit code.

    The rank writes its error to a file, and ends when its launcher ends.
    """
    work = json.loads(text)
    request = LaunchRequest(**work["request"])
    threading.Thread(target=_end_with_launcher, args=(work["watch"],), daemon=True).start()
    try:
        if request.replay is not None:
            from zerodrift.train.tools.replay import replay_here

            replay_here(request.source, request.overrides, **request.replay)
            return 0
        code = run_here(request)
        return IN_ORDER + code - 128 if code else 0
    except SystemExit as stopped:  # by a signal before the first step
        os._exit(stopped.code if isinstance(stopped.code, int) else 1)
    except KeyboardInterrupt:  # in a replay, which has nothing to finish
        os._exit(128 + signal.SIGINT)
    except BaseException as error:
        refusal = error if isinstance(error, ZerodriftError) else None
        message = traceback.format_exc() if refusal is None or request.debug else str(refusal)
        with contextlib.suppress(OSError):  # the disk may be full, which the launcher reports
            write_failure(work["failure"], message, refusal, time.monotonic())
            print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Threads of a broken process group may never come back.
        os._exit(1 if refusal is None else 2)


def _end_with_launcher(pipe: int) -> None:
    """Wait for the end of the launcher, which closes the pipe however it ends."""
    os.read(pipe, 1)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
