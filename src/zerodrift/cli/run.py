"""Run a DeepSpeed command on zerodrift: `run`.

Invariant: if a process of the command uses the installed DeepSpeed instead, an error or a note says so.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from zerodrift import alias, startup
from zerodrift.cli import options, streams
from zerodrift.errors import ZerodriftError
from zerodrift.versions import DEEPSPEED, __version__

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are forwarded to the command. The terminal itself sends it SIGINT."""

_PYTHON_ADVICE = (
    "Python must read PYTHONPATH: no `python -I`, `-E` or `-S`, no PYTHONPATH that replaces the one given."
)


def run(
    command: options.Command,
    as_: options.StandInFor = alias.NAME,
    pin: options.PinnedPatterns = None,
    set_: options.AddedKeys = None,
    config: options.AddedFile = None,
    plan: options.WholePlan = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Run a command in which `import deepspeed` is zerodrift, in each of its Python processes.

    The command is not changed, and DeepSpeed need not be installed. Added keys must not contradict the
    config of the command. Rank 0 prints the plan in a few lines. Exit code: that of the command, or 2 if its
    Python processes could not be reached.

    \b
    Examples:
      zerodrift run -- torchrun --nproc-per-node 8 train.py
      zerodrift run -- accelerate launch \\
        --config_file zero3.yaml train.py
      zerodrift run -- deepspeed --num_gpus 8 train.py
      zerodrift run --pin '*.router.*' -- trl sft
      zerodrift run --set precision.reduce=fp32 \\
        -- llamafactory-cli train sft.yaml
    """
    with streams.errors(debug):
        if as_ != alias.NAME:
            raise ZerodriftError("--as", f"must be {alias.NAME}", got=repr(as_))
        _require_reachable(command)
        if plan and quiet:
            raise typer.BadParameter("give --plan or --quiet, not both")
        shown = "plan" if plan else "none" if quiet else "brief"
        added: dict[str, object] = {}
        flags: dict[str, str] = {}  # key -> the flag that set it
        if config is not None or set_ or pin:
            from zerodrift.config import Additions

            additions = Additions.from_flags(config, set_ or [], pin or [])
            added, flags = additions.config, dict(additions.flags)
        raise typer.Exit(_run(command, added, flags, shown))


def _require_reachable(command: list[str]) -> None:
    """Refuse a Python that ignores PYTHONPATH, and a run inside another one."""
    if option := startup.isolation_option(command):
        must, where = "must run a Python that reads PYTHONPATH", shlex.join(command)
        raise ZerodriftError(where, must, got=f"`{option}`", do="Leave it out.")
    if alias.run_settings() is not None:
        must, got = "must not be inside another one", "a process of `zerodrift run`"
        raise ZerodriftError("zerodrift run", must, got=got, do="Leave one of the two out.")


def _run(command: list[str], added: dict[str, object], flags: dict[str, str], shown: str) -> int:
    hook = startup.StartupHook("zerodrift.alias", "begin", (added, flags, shown), guarded=(alias.NAME,))
    with startup.startup_folder(hook, "zerodrift-run-") as folder:
        launcher = folder / "bin" / "deepspeed"  # for machines without DeepSpeed
        launcher.parent.mkdir()
        start = f"exec {shlex.quote(sys.executable)} -m deepspeed.launcher.runner"
        launcher.write_text(f'#!/bin/sh\n{start} "$@"\n')
        launcher.chmod(0o755)
        more = f"; added to its config: {', '.join(flags.values())}" if flags else ""
        _say(f"`{alias.NAME}` is zerodrift {__version__}, with the names of DeepSpeed {DEEPSPEED}{more}")
        child = startup.spawn(command, folder)
        with _forward_signals(child):
            code = child.wait()
        return _exit_code(folder, code if code >= 0 else 128 - code, flags)


@contextlib.contextmanager
def _forward_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda it, _: child.send_signal(it)) for number in _FORWARDED}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(folder: Path, code: int, flags: dict[str, str]) -> int:
    """Return the exit code of the command, or USAGE if it did not run on zerodrift."""
    reached = {path.name for path in folder.iterdir()}
    failures = startup.failures(folder)
    for failure in failures:
        print(f"zerodrift: error: {failure}", file=sys.stderr)
    if failures and "imported" not in reached:
        return code or streams.USAGE
    if "started" not in reached:
        must = "must reach the Python processes of the command"
        error = ZerodriftError("zerodrift run", must, got="none", do=_PYTHON_ADVICE)
        print(f"zerodrift: error: {error}", file=sys.stderr)
        return code or streams.USAGE
    if "imported" not in reached:
        _say(f"no process imported `{alias.NAME}` from zerodrift. If one was to: {_PYTHON_ADVICE}")
    elif "initialized" not in reached and flags:
        unused = f"nothing was done with {', '.join(flags.values())}"
        _say(f"no process called `{alias.NAME}.initialize`: {unused}")
    return code


def _say(text: str) -> None:
    print(f"zerodrift run: {text}", file=sys.stderr, flush=True)
