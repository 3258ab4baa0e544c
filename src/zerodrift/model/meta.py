"""Runs someone else's code that builds a module, on the meta device, and says in a line what went wrong.

No memory is allocated for weights: a tensor on the meta device has a shape and a dtype and nothing else.
What is built, and what it is checked for, is the caller's business.

Invariant: an exception of the code that was run leaves here as a ModelError of one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zerodrift.errors import ModelError

T = TypeVar("T")

CAUSE_SHOWN = 600
"""Characters of a cause that a message shows."""


def on_meta(make: Callable[[], T], where: str, must: str, todo: str = "") -> T:
    """What `make` returns, with the meta device as the default for every tensor in it."""
    import torch

    def build() -> T:
        with torch.device("meta"):
            return make()

    return attempt(build, where, must, todo)


def attempt(make: Callable[[], T], where: str, must: str, todo: str = "") -> T:
    """What `make` returns; if it raises, a ModelError that says "`where`: must; got the cause. todo"."""
    try:
        return make()
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(where, must, got=cause(error), do=todo) from error


def cause(error: BaseException) -> str:
    """An exception in one line: its class and its message."""
    message = " ".join(str(error).split())
    if len(message) > CAUSE_SHOWN:
        message = message[:CAUSE_SHOWN] + " ..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
