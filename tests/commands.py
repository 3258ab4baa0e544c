"""The command line as a person runs it, without waiting for imports.

A process of its own, with its own standard streams, environment and exit code, forked from a server that has
torch and zerodrift imported (`ranks/preload.py`); `python -m zerodrift` itself takes seconds to import them.
What depends on the start of the interpreter, or on what is not imported, needs `subprocess` instead.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

from tests.ranks.harness import forks, redirect


def run(*arguments: str | Path, timeout: float = 120.0, **environment: str) -> CompletedProcess[str]:
    """What `zerodrift ARGUMENTS` prints and ends with, in the current folder."""
    words = [*map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="command-") as name:
        folder = Path(name)
        process = forks().Process(
            target=_main, args=(words, folder, os.getcwd(), {**os.environ, **environment})
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutExpired(words, timeout)
        out, err = ((folder / stream).read_text() for stream in ("out", "err"))
        return CompletedProcess(words, process.exitcode or 0, out, err)


def _main(words: list[str], folder: Path, current: str, environment: dict[str, str]) -> None:
    """The life of the process."""
    redirect(folder / "out", folder / "err")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(current)
    sys.argv = ["zerodrift", *words]
    from zerodrift.cli import main

    main()
