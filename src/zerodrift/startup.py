"""Hooks that run at the start of every Python process of a command, and when a module is imported.

The command's `PYTHONPATH` begins with a folder that has a `sitecustomize` module, which Python imports when
it starts. The module calls the hook and then imports any other `sitecustomize`.

This file does not import torch, since many processes of a command never need it.

Invariant: a process whose hook fails goes on and leaves a record. It cannot import the guarded modules.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from zerodrift.errors import ZerodriftError, said


@dataclass(frozen=True, slots=True)
class StartupHook:
    """Call at the start of a process: `module.function(folder, *arguments)`."""

    module: str
    function: str
    arguments: tuple[Any, ...] = ()
    """JSON values."""
    guarded: tuple[str, ...] = ()
    """Modules that a process cannot import if the hook fails."""


@contextmanager
def startup_folder(hook: StartupHook, prefix: str) -> Iterator[Path]:
    """Make a temporary folder with the `sitecustomize` module of a hook."""
    with tempfile.TemporaryDirectory(prefix=prefix) as made:
        folder = Path(made)
        (folder / "site").mkdir()
        text = _START.format(
            package=str(Path(__file__).resolve().parent),  # for a Python without zerodrift
            folder=str(folder),
            module=hook.module,
            function=hook.function,
            arguments=json.dumps(hook.arguments),
            guarded=hook.guarded,
        )
        (folder / "site" / "sitecustomize.py").write_text(text)
        yield folder


def spawn(
    command: Sequence[str], folder: Path, stdout: int | IO[bytes] | None = None, new_session: bool = False
) -> subprocess.Popen[bytes]:
    """Start a command with the hook of a folder in its processes, optionally in a new session.

    Programs in the `bin` of the folder come last in the command's PATH.
    """
    python_path = filter(None, (str(folder / "site"), os.environ.get("PYTHONPATH")))
    path = (os.environ.get("PATH") or os.defpath, str(folder / "bin"))
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(python_path), "PATH": os.pathsep.join(path)
    }  # fmt: skip
    try:
        return subprocess.Popen(
            [shutil.which(command[0], path=environment["PATH"]) or command[0], *command[1:]],
            env=environment,
            stdout=stdout,
            start_new_session=new_session,
        )
    except OSError as error:
        beside = shutil.which(command[0], path=os.path.dirname(sys.executable))
        do = f"Give its path: {beside}." if beside else "Give its path, or add its folder to PATH."
        must, got = "must be a command that can be run", error.strerror or error
        raise ZerodriftError(command[0], must, got=got, do=do) from None


def record_failure(folder: str, error: Exception) -> None:
    (Path(folder) / f"{os.getpid()}.failed").write_text(f"{sys.executable}: {said(error)}")


def failures(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*.failed"))]


def when_imported(name: str, call: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call with a module, now or when it is imported. Return a function that cancels this."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        call(module)
        return lambda: None
    finder = _ImportFinder(name, call)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _ImportFinder(importlib.abc.MetaPathFinder):
    """A finder that uses the other finders, and calls back after the module was executed."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # It stays after the search: a module may be searched for without being imported.
        others = [] if name != self._name else [f for f in sys.meta_path if not isinstance(f, _ImportFinder)]
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == name:
                    self._imported()

            loader.exec_module = exec_module
        return spec

    def _imported(self) -> None:
        """Call back, as every other finder of the same module does."""
        for finder in [each for each in sys.meta_path if isinstance(each, _ImportFinder)]:
            if finder._name == self._name:
                finder.leave()
                finder._call(sys.modules[self._name])


def isolation_option(command: Sequence[str]) -> str:
    """Return the option by which a Python of the command would ignore its environment, or `""`."""
    words = iter(command)
    for word in words:
        if not _PYTHON.fullmatch(os.path.basename(word)):
            continue
        for option in words:
            if not option.startswith("-") or option in ("-", "-c", "-m"):
                break
            if _ISOLATED.match(option):
                return option
            if option in ("-W", "-X", "--check-hash-based-pycs"):
                next(words, None)
    return ""


_PYTHON = re.compile(r"python[0-9.]*(\.exe)?")
_ISOLATED = re.compile(r"-[bBdhiOPqsuvVx]*[EIS]")


_START = '''\
import importlib.machinery, importlib.util, json, os, sys

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]


class _Zerodrift:
    """Finder of our zerodrift, used if none is installed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "zerodrift":
            folder = {package!r}
            return importlib.util.spec_from_file_location(
                name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
            )


class _Guard:
    """Finder that refuses imports of guarded modules."""

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
