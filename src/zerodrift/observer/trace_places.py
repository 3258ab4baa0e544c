"""Where an operation of a trace is: the module whose forward is under way, the line of the model's code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zerodrift.engine import compute, pins
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
    def current(self) -> tuple[str, int]:
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


_TORCH = os.path.dirname(torch.__file__) + os.sep
_ENGINE = os.path.dirname(compute.__file__) + os.sep
CASTING: dict[str, CastBy] = {compute.__file__: "a boundary", pins.__file__: "a pin"}


@functools.cache
def is_the_models(file: str) -> bool:
    own = file.startswith((_TORCH, _ENGINE, os.path.dirname(__file__) + os.sep, "<"))
    return not own and os.path.basename(file) != "contextlib.py"


def told(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


def line_of(error: BaseException) -> str:
    """Of the innermost frame that is the model's code."""
    found, trace_back = "", error.__traceback__
    while trace_back is not None:
        frame = trace_back.tb_frame
        if is_the_models(frame.f_code.co_filename):
            found = told(frame.f_code.co_filename, trace_back.tb_lineno)
        trace_back = trace_back.tb_next
    return found
