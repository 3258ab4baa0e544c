"""Which module's forward is under way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Path:
    """Of the innermost module whose forward is under way."""

    def __init__(self) -> None:
        self._stack: list[str] = []

    @property
    def current(self) -> str:
        """`""` in the model itself, and outside of it."""
        return self._stack[-1] if self._stack else ""

    def enter(self, path: str, module: nn.Module, args: Any) -> None:
        self._stack.append(path)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


@contextlib.contextmanager
def path_in(model: nn.Module) -> Iterator[Path]:
    """The path, by hooks on every module for as long as the context lasts."""
    path, handles = Path(), []
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):  # which take no hooks: they are part of a caller
            enter = functools.partial(path.enter, name)
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(path.leave, always_call=True))
    try:
        yield path
    finally:
        for handle in handles:
            handle.remove()
