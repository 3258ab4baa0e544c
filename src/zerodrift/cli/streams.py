"""What goes to which stream, and how a verb ends.

Only the product goes to stdout, so `--json` can be piped; messages and the progress line go to stderr.

Invariant: what zerodrift refuses ends as one message and exit code 2, never as a traceback.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import typer

from zerodrift.errors import ZerodriftError, refused_by_system
from zerodrift.legible import encodable, legible

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit codes; the last two are those of a shell for SIGINT and SIGPIPE."""


@contextmanager
def errors(debug: bool) -> Iterator[None]:
    """Refusals as a message on stderr and an exit code."""
    try:
        yield
    except ZerodriftError as error:
        if debug:
            traceback.print_exc()
        print(f"zerodrift: error: {error}", file=sys.stderr)
        raise typer.Exit(USAGE) from None
    except OSError as error:
        refused = refused_by_system(error)
        if refused is None or debug:
            raise
        print(f"zerodrift: error: {refused}", file=sys.stderr)
        raise typer.Exit(USAGE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def color() -> bool:
    """Colour for a person at a terminal who has not said no (https://no-color.org)."""
    dumb = os.environ.get("TERM") == "dumb"
    return sys.stdout is not None and sys.stdout.isatty() and not dumb and not os.environ.get("NO_COLOR")


def environment() -> Mapping[str, str]:
    """The process's own, for whoever says what it does."""
    return os.environ


def look() -> dict[str, Any]:
    """How a report is set: as wide as the terminal, within what can be read, and 100 columns elsewhere."""
    from zerodrift.report.frame import WIDTH

    wide = sys.stdout is not None and sys.stdout.isatty()
    columns = shutil.get_terminal_size((WIDTH, 24)).columns if wide else WIDTH
    return {"color": color(), "width": max(NARROWEST, min(columns, WIDEST))}


NARROWEST, WIDEST = 50, 120
"""Columns of a report on a terminal."""


def progress(text: str) -> AbstractContextManager[object]:
    """A spinner while a large model is read, where somebody is watching."""
    if sys.stderr is None or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(legible(text)))


def watched() -> bool:
    """Whether somebody watches what is done."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def counted() -> Iterator[Callable[[str, int, int], None]]:
    """A line that says what is done, how much of it is, and how long the rest takes."""
    from rich.console import Console
    from rich.text import Text

    began: dict[str, float] = {}
    with Console(stderr=True).status("") as line:

        def told(what: str, done: int, of: int) -> None:
            now = time.monotonic()
            since = now - began.setdefault(what, now)
            left = f"  {since / done * (of - done):.0f} s left" if done and since > 1 else ""
            line.update(Text(f"{what} {done} of {of}{left}" if of > 1 else what))

        yield told


def emit(text: str) -> None:
    """Print the product. A reader who has gone away, `| head`, is no error; a disk that is full is."""
    if sys.stdout is None:  # a shell's `>&-`
        raise ZerodriftError("stdout", "must be open, for what is printed", got="a closed stream")
    try:
        sys.stdout.write(encodable(text, sys.stdout.encoding))
        sys.stdout.flush()
    except OSError as error:
        raise _not_taken(error) from None


@contextmanager
def printing() -> Iterator[None]:
    """The same of what is printed for us: help, and what a parser says."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_STREAMS:
            raise
        ended = _not_taken(error)
        if isinstance(ended, typer.Exit):
            sys.exit(ended.exit_code)
        print(f"zerodrift: error: {ended}", file=sys.stderr)
        sys.exit(USAGE)


def _not_taken(error: OSError) -> Exception:
    """What it means that stdout takes no more."""
    # Python flushes stdout once more at exit; let it have something to write to.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return typer.Exit(BROKEN_PIPE)
    return ZerodriftError("stdout", "must take what is printed", got=error.strerror or error)


_OF_STREAMS = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF)
