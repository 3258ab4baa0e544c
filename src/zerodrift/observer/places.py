"""Where an operation is: the module whose forward is under way, the line of the model's code.

What casts at a boundary or a pin is of the line that it casts for; what an engine does for itself is of none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zerodrift.engine import compute, nested, pins
from zerodrift.plan.traced import CastBy


class ModulePaths:
    """Which module's forward is under way, by hooks on every module."""

    def __init__(self, model: nn.Module) -> None:
        scripted = torch.jit.ScriptModule  # which take no hooks: they are part of what calls them
        self._modules = [each for each in model.named_modules() if not isinstance(each[1], scripted)]
        self._stack: list[tuple[str, int]] = []
        self._calls: dict[str, int] = {}
        self.failed = ""
        """Path of the innermost module that raised."""

    @property
    def current(self) -> str:
        """Of the innermost one; empty in the model itself, and outside of it."""
        return self.call[0]

    @property
    def call(self) -> tuple[str, int]:
        """The same, and how many calls of it there were before."""
        return self._stack[-1] if self._stack else ("", 0)

    @property
    def inside(self) -> bool:
        return bool(self._stack)

    def enter(self) -> Iterator[Any]:
        """To be before whatever else is around a module."""
        for path, module in self._modules:
            yield module.register_forward_pre_hook(functools.partial(self._enter, path), prepend=True)

    def leave(self) -> Iterator[Any]:
        """To be after whatever else is around it."""
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
    """The paths, for as long as the context lasts."""
    paths = ModulePaths(model)
    handles = [*paths.enter(), *paths.leave()]
    try:
        yield paths
    finally:
        for handle in handles:
            handle.remove()


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_WATCHES = tuple(os.path.join(_PACKAGE, room) + os.sep for room in ("observer", "inspect"))
_CASTS: dict[str, CastBy] = {compute.__file__: "a boundary", pins.__file__: "a pin"}


@functools.cache
def _whose(file: str) -> str:
    """`model`, or `ours`; empty for what is passed on the way out to either."""
    if file.startswith((_TORCH, *_WATCHES, "<")) or file in _CASTS or file == nested.__file__:
        return ""
    if file.startswith(_PACKAGE):
        return "ours"
    return "" if os.path.basename(file) == "contextlib.py" else "model"


def place_of_code() -> tuple[str, CastBy]:
    """`file:line` of the model's code that is under way, and what of the engine casts for it."""
    by: CastBy = ""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        by = by or _CASTS.get(file, "")
        whose = _whose(file)
        if whose:
            return (_told(file, frame.f_lineno) if whose == "model" else ""), by
        frame = frame.f_back
    return "", by


def line_of(error: BaseException) -> str:
    """Of the innermost frame that is the model's code."""
    found, trace_back = "", error.__traceback__
    while trace_back is not None:
        file = trace_back.tb_frame.f_code.co_filename
        if _whose(file) == "model":
            found = _told(file, trace_back.tb_lineno)
        trace_back = trace_back.tb_next
    return found


def _told(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"
