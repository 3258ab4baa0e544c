"""Something to do at the start of every Python process of a command, whatever that process will be.

The command runs as it stands, with one folder before its `PYTHONPATH`: Python imports the `sitecustomize` in
it at its start, which does what it is there for, and imports the one that would have been there. What the
processes have to tell they leave in that folder.

Invariant: a process in which the start fails goes on, says so in the folder, and cannot import what the start
was to guard.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from zerodrift.errors import ZerodriftError, said


@dataclass(frozen=True, slots=True)
class Start:
    """What a process does first: `module.function(folder, *arguments)`."""

    module: str
    function: str
    arguments: tuple[Any, ...] = ()
    """What JSON can hold."""
    guarded: tuple[str, ...] = ()
    """Modules that cannot be imported in a process where this fails."""


@contextmanager
def starting(start: Start, prefix: str) -> Iterator[Path]:
    """The folder, until the command has ended."""
    with tempfile.TemporaryDirectory(prefix=prefix) as made:
        folder = Path(made)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(_text(start, folder))
        yield folder


def spawn(
    command: Sequence[str], folder: Path, stdout: int | IO[bytes] | None = None, apart: bool = False
) -> subprocess.Popen[bytes]:
    """The command, with that start in its processes; `apart` in a session of its own. What is in the folder's
    `bin` is a program where there is no other of its name."""
    environment = {
        **os.environ,
        "PYTHONPATH": _joined(str(folder / "site"), os.environ.get("PYTHONPATH", "")),
        "PATH": _joined(os.environ.get("PATH", os.defpath), str(folder / "bin")),
    }
    try:
        return subprocess.Popen(
            _found(command, environment["PATH"]), env=environment, stdout=stdout, start_new_session=apart
        )
    except OSError as error:
        raise ZerodriftError(
            command[0],
            "must be a command that can be run",
            got=error.strerror or error,
            do=_where_else(command[0]),
        ) from None


def _where_else(program: str) -> str:
    """What to do about a program that is not found: that of an environment which nobody activated is beside
    its Python."""
    beside = shutil.which(program, path=os.path.dirname(sys.executable))
    return f"Give its path: {beside}." if beside else "Give its path, or add its folder to PATH."


def tell_failure(folder: str, error: Exception) -> None:
    """Leave word of what could not be begun later on."""
    (Path(folder) / f"{os.getpid()}.failed").write_text(f"{sys.executable}: {said(error)}")


def failures(folder: Path) -> list[str]:
    """Why processes could not start as they should, each of them."""
    return [path.read_text() for path in sorted(folder.glob("*.failed"))]


def deaf(command: Sequence[str]) -> str:
    """The option by which a Python of a command would not read its environment; empty where there is none."""
    words = iter([*_interpreter(command[0]), *command])
    for word in words:
        if not _PYTHON.fullmatch(os.path.basename(word)):
            continue
        for option in words:
            if not option.startswith("-") or option in ("-", "-c", "-m"):
                break
            if _DEAF.match(option):
                return option
            if option in ("-W", "-X", "--check-hash-based-pycs"):
                next(words, None)
    return ""


_PYTHON = re.compile(r"python[0-9.]*(\.exe)?")
_DEAF = re.compile(r"-[bBdhiOPqsuvVx]*[EIS]")


def _interpreter(program: str) -> list[str]:
    """What a script names in its first line."""
    found = _found([program], os.environ.get("PATH", os.defpath))[0]
    try:
        with open(found, "rb") as file:
            first = file.readline(512)
    except OSError:
        return []
    return first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []


def _found(command: Sequence[str], path: str) -> list[str]:
    """With the program's place in `path`, which is the command's and not ours."""
    return [shutil.which(command[0], path=path) or command[0], *command[1:]]


def _joined(*paths: str) -> str:
    return os.pathsep.join(filter(None, paths))


def _text(start: Start, folder: Path) -> str:
    """The text of `sitecustomize.py`. It may run in a Python that has no zerodrift: then ours is found."""
    return _START.format(
        package=str(Path(__file__).resolve().parent),
        folder=str(folder),
        module=start.module,
        function=start.function,
        arguments=json.dumps(start.arguments),
        guarded=start.guarded,
    )


_START = '''\
import importlib.machinery, importlib.util, json, os, sys

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]


class _Zerodrift:
    """Found where no other is."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "zerodrift":
            folder = {package!r}
            return importlib.util.spec_from_file_location(
                name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
            )


class _Guard:
    """Lets nobody import what was to be guarded."""

    def __init__(self, reason):
        self.reason = reason

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {guarded!r}:
            raise ImportError("zerodrift could not be started in this process: " + self.reason)


def _failed(error):
    reason = type(error).__name__ + ": " + str(error)
    sys.meta_path.insert(0, _Guard(reason))
    with open(os.path.join({folder!r}, str(os.getpid()) + ".failed"), "w") as file:
        file.write(sys.executable + ": " + reason)
    for name in {guarded!r}:
        if name in sys.modules:
            sys.stderr.write("zerodrift: error: " + str(error) + chr(10))
            os._exit(2)


sys.meta_path.append(_Zerodrift)
try:
    from {module} import {function} as _start

    _start({folder!r}, *json.loads({arguments!r}))
except Exception as error:
    _failed(error)

_other = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _other is not None and _other.loader is not None:
    _module = importlib.util.module_from_spec(_other)
    sys.modules["sitecustomize"] = _module
    _other.loader.exec_module(_module)
'''
