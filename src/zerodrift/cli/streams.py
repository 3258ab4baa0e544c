"""Streams and exit codes of the command line.

Only results go to stdout, so that `--json` can be piped. Messages and progress go to stderr.

Invariant: a refusal ends as one message and exit code 2, never as a traceback.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from zerodrift.errors import ZerodriftError, refused_by_system
from zerodrift.legible import encodable, legible

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit codes. The last two are those of a shell for SIGINT and SIGPIPE."""

IN_A_SHELL = (
    ("`overrides`: ", "`--set`: "),
    ("`dtype`: ", "`--dtype`: "),
    ("say `overwrite`", "say `--overwrite`"),
    ("it with `trust`", "it with `--trust`"),
    ("`device='cpu'`", "`--set run.device=cpu`"),
    ("`parts=zerodrift.Parts(...)`", "`--set model.parts=package.module:function`"),
    ("allow it: `strict=[...]` with globs", "load them by `model.source: package.module:function`"),
)
"""Words for an argument in Python -> words for the reader of a command, who has flags and keys of a job."""


@contextmanager
def errors(debug: bool) -> Iterator[None]:
    """Turn refusals into a message on stderr and an exit code."""
    try:
        yield
    except (ZerodriftError, OSError) as error:
        refused = error if isinstance(error, ZerodriftError) else refused_by_system(error)
        if refused is None:
            raise
        if debug:
            traceback.print_exc()
        text = str(refused)
        for of_python, of_shell in IN_A_SHELL:
            text = text.replace(of_python, of_shell)
        print(f"zerodrift: error: {text}\n{refused.see()}", file=sys.stderr)
        raise typer.Exit(USAGE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def color() -> bool:
    """Return True if stdout is a terminal and NO_COLOR is unset (https://no-color.org)."""
    dumb = os.environ.get("TERM") == "dumb"
    return sys.stdout is not None and sys.stdout.isatty() and not dumb and not os.environ.get("NO_COLOR")


def layout() -> dict[str, Any]:
    from zerodrift.report import report_width

    return {"color": color(), "width": report_width()}


@contextmanager
def progress(text: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a spinner while stderr is a terminal.

    Yields a function that shows the current work, how much of it is done, and the time left.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.text import Text

    began: dict[str, float] = {}
    with Console(stderr=True).status(Text(legible(text))) as line:

        def show(what: str, done: int, of: int) -> None:
            now = time.monotonic()
            since = now - began.setdefault(what, now)
            left = f"  {since / done * (of - done):.0f} s left" if done and since > 1 else ""
            line.update(Text(f"{what} {done} of {of}{left}" if of > 1 else what))

        yield show


def emit(text: str) -> None:
    """Print a result. A closed pipe, as after `head`, exits silently; a full disk is an error."""
    if sys.stdout is None:  # a shell's `>&-`
        raise ZerodriftError("stdout", "must be open for the output", got="a closed stream")
    try:
        sys.stdout.write(encodable(text, sys.stdout.encoding))
        sys.stdout.flush()
    except OSError as error:
        raise _stdout_error(error) from None


@contextmanager
def guard_stdout() -> Iterator[None]:
    """Handle errors of stdout while typer prints help."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_STREAMS:
            raise
        ended = _stdout_error(error)
        if isinstance(ended, typer.Exit):
            sys.exit(ended.exit_code)
        print(f"zerodrift: error: {ended}", file=sys.stderr)
        sys.exit(USAGE)


def _stdout_error(error: OSError) -> Exception:
    """Return the exit or the error for a stdout that cannot be written."""
    # Python flushes stdout again at exit, which must not fail.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return typer.Exit(BROKEN_PIPE)
    return ZerodriftError("stdout", "must accept the output", got=error.strerror or error)


_OF_STREAMS = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF)
