"""A defect of ours ends the watching of a run, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


class Breakable(Protocol):
    """A watcher, as far as it can be ended."""

    active: bool

    def broken(self, error: Exception) -> None: ...


def guarded(method: Method) -> Method:
    """A method of a part of a watcher, that does nothing once the watching is over."""

    @functools.wraps(method)
    def call(part: Any, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return None  # what is compiled goes without
        watcher: Breakable = part._watcher
        if watcher.active:
            try:
                return method(part, *args)
            except Exception as error:
                watcher.broken(error)
        return None

    return cast(Method, call)
