"""Find the place of a call: the module whose forward is under way, and the line of the script or the model.

A cast at a boundary or a pin has the line of the code that it casts for. A call that the engine or a library
makes for itself has none.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zerodrift.plan import CastBy

_HERE = os.path.dirname(__file__) + os.sep
_INSPECT = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_LIBRARY_KEYS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = tuple(os.path.realpath(sysconfig.get_paths()[key]) + os.sep for key in _LIBRARY_KEYS)
_SITES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of packages in any path: those of a user, or of an environment below this one."""


class ModulePaths:
    """The path of the module whose forward is under way, known by hooks on every module."""

    def __init__(self, model: nn.Module) -> None:
        scripted = torch.jit.ScriptModule  # takes no hooks, and counts as part of its caller
        self._modules = [each for each in model.named_modules() if not isinstance(each[1], scripted)]
        self._stack: list[tuple[str, int]] = []
        self._calls: dict[str, int] = {}
        self.failed = ""  # path of the innermost module that raised

    @property
    def current(self) -> str:
        """Path of the innermost module; empty in the model itself, and outside of it."""
        return self.call[0]

    @property
    def call(self) -> tuple[str, int]:
        """The innermost module's path, and the number of its calls before."""
        return self._stack[-1] if self._stack else ("", 0)

    @property
    def inside(self) -> bool:
        return bool(self._stack)

    def enter(self) -> Iterator[Any]:
        """Register hooks that run before all others of a module."""
        for path, module in self._modules:
            yield module.register_forward_pre_hook(functools.partial(self._enter, path), prepend=True)

    def leave(self) -> Iterator[Any]:
        """Register hooks that run after those that a module has."""
        for path, module in self._modules:
            yield module.register_forward_hook(functools.partial(self._leave, path), always_call=True)

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        self.failed = ""
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        self._stack.append((path, call))

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if sys.exc_info()[0] is not None and not self.failed:
            self.failed = path
        self._stack.pop()


@contextlib.contextmanager
def paths_in(model: nn.Module) -> Iterator[ModulePaths]:
    """Track the module that runs, until the context ends."""
    paths = ModulePaths(model)
    handles = [*paths.enter(), *paths.leave()]
    try:
        yield paths
    finally:
        for handle in handles:
            handle.remove()


@functools.cache
def _casts() -> dict[str, CastBy]:
    """Return the engine's files that cast, by path."""
    from zerodrift.engine import compute, nested, pins

    return {compute.__file__: "a boundary", pins.__file__: "a pin", nested.__file__: ""}


@functools.cache
def _is_models(file: str) -> bool | None:
    """Return True for code of the model, False for ours, None for frames between the two."""
    if file.startswith((_TORCH, _INSPECT, "<")) or file in _casts():
        return None
    if file.startswith(_PACKAGE):
        return False
    return None if os.path.basename(file) == "contextlib.py" else True


@functools.cache
def _is_script(file: str) -> bool | None:
    """Return True for a script, False for a library, None for frames between the two."""
    if file.startswith(("<", _HERE)):
        return None
    return not (file.startswith((_PACKAGE, *_LIBRARIES, *_targets())) or any(part in file for part in _SITES))


@functools.cache
def _targets() -> tuple[str, ...]:
    """Return the folders of `pip install --target` on the path, which have the names of no environment.

    Except the folder of the script: Python puts it on the path whatever lies there.
    """
    script = os.path.realpath(os.path.dirname(getattr(sys.modules["__main__"], "__file__", None) or ""))
    folders = (folder for folder in sys.path if folder and os.path.realpath(folder) != script)
    return tuple(folder + os.sep for folder in folders if glob.glob(f"{glob.escape(folder)}/*.dist-info"))


def _frames() -> Iterator[tuple[str, types.FrameType]]:
    """Yield the files and frames of the calls that are under way, the innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame
        frame = frame.f_back


def _line(frame: types.FrameType, line: int | None = None) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno if line is None else line}"


def place_of_code() -> tuple[str, CastBy]:
    """Return `file:line` of the model's code that is under way, and who in the engine casts for it."""
    by: CastBy = ""
    for file, frame in _frames():
        by = by or _casts().get(file, "")
        is_models = _is_models(file)
        if is_models is not None:
            return (_line(frame) if is_models else ""), by
    return "", by


def line_of(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error in the model's code."""
    found, trace_back = "", error.__traceback__
    while trace_back is not None:
        if _is_models(trace_back.tb_frame.f_code.co_filename):
            found = _line(trace_back.tb_frame, trace_back.tb_lineno)
        trace_back = trace_back.tb_next
    return found


def is_from_script() -> bool:
    """Return True if a script, not a library for itself, makes the call that is under way."""
    known = (_is_script(file) for file, _ in _frames())
    return next((is_script for is_script in known if is_script is not None), False)


def line_of_script() -> str:
    """Return `file:line` of the innermost frame that is in no library; empty if there is none."""
    return next((_line(frame) for file, frame in _frames() if _is_script(file)), "")
