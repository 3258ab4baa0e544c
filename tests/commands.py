"""The command line as a person runs it, without waiting for imports.

A process of its own, with its own standard streams, environment and exit code, forked from a server that has
torch and zerodrift imported (`ranks/preload.py`); `python -m zerodrift` itself takes seconds to import them.
Ranks that it starts are forked from it in turn. What depends on the start of an interpreter, or on what is
not imported, needs `subprocess` instead.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import IO, Any

from tests.ranks.harness import forks, redirect


def run(
    *arguments: str | Path, timeout: float = 120.0, folder: str | Path = "", **environment: str
) -> CompletedProcess[str]:
    """Run `zerodrift ARGUMENTS` in a folder, by default the current one; return its output and exit code."""
    command = Command(*arguments, folder=folder, **environment)
    out, err = command.communicate(timeout)
    return CompletedProcess(command.args, command.returncode or 0, out, err)


class Command:
    """A process of `zerodrift ARGUMENTS` in a folder, with the part of `subprocess.Popen` that tests use."""

    def __init__(
        self, *arguments: str | Path, folder: str | Path = "", is_read: bool = False, **environment: str
    ) -> None:
        """Start it. If `is_read`, its output is a pipe, for `first_line`, and else kept to its end."""
        self.args = [*map(str, arguments)]
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        if is_read:
            os.mkfifo(Path(self._folder.name) / "out")
        current = str(folder) or os.getcwd()
        work = (self.args, Path(self._folder.name), current, {**os.environ, **environment})
        self._process = forks().Process(target=_main, args=work)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def first_line(self) -> str:
        """Read a line of the output, and close the pipe."""
        out = Path(self._folder.name) / "out"
        with out.open() as pipe:
            line = pipe.readline()
        out.unlink()
        out.touch()
        return line

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """Wait for the end of the process and return its output."""
        self._process.join(timeout)
        if self._process.is_alive():
            self.kill()
            self._process.join()
            raise TimeoutExpired(self.args, timeout)
        out, err = ((Path(self._folder.name) / stream).read_text() for stream in ("out", "err"))
        return out, err

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _main(words: list[str], folder: Path, current: str, environment: dict[str, str]) -> None:
    """Run the command in the forked process."""
    redirect(folder / "out", folder / "err")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(current)
    sys.argv = ["zerodrift", *words]
    sys.path.insert(0, current)  # as `python -m` does
    from zerodrift.cli import main
    from zerodrift.train.loop.launcher import Launcher

    Launcher._start = _fork  # type: ignore[assignment,method-assign]
    main()


class _Forked:
    """A process with the interface that its launcher needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _fork(launcher: Any, number: int, work: str, environment: dict[str, str], errors: IO[bytes]) -> _Forked:
    """Start a rank that has its imports, for `Launcher._start`."""
    pid = os.fork()
    if pid:
        return _Forked(pid)
    code = 1
    try:
        os.setsid()
        os.close(launcher._write)
        for stream in (1, 2)[number == 0 :]:
            os.dup2(errors.fileno(), stream)
        os.environ.clear()
        os.environ.update(environment)
        from zerodrift.train.loop import start

        code = start.main(work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
