"""The call of torch.distributed that the main thread waits in, and the line of the user's code that made it.

The thread of `watch.py` asks for waits outside of its mesh. Frames of Python show the call: the outermost of
the innermost frames that belong to torch.distributed or to this package.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_COMM = str(Path(__file__).parent) + os.sep

_CALLS = frozenset(distributed_c10d.__all__)


@dataclass(frozen=True, slots=True)
class ForeignCall:
    """A call of torch.distributed, or a collective of another mesh, that the main thread is in."""

    key: tuple[int, int]
    name: str
    at: str
    """The line of the user's code."""
    ranks: Sequence[int]
    """The ranks of its group; empty if unknown."""
    is_barrier: bool
    """True if no rank leaves it before all have come."""


def foreign_call() -> ForeignCall | None:
    """Return the call that the main thread waits in; None if it is busy."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or not frame.f_code.co_filename.startswith((_DISTRIBUTED, _COMM)):
        return None
    outermost: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_COMM) or (name == distributed_c10d.__file__ and frame.f_code.co_name in _CALLS):
            outermost = frame
        elif outermost is not None and not name.startswith(_DISTRIBUTED):
            break
        frame = frame.f_back
    if outermost is None:
        return None
    key, at, called = (id(outermost), outermost.f_lasti), user_line(outermost), outermost.f_code.co_name
    if outermost.f_code.co_filename.startswith(_COMM):
        return ForeignCall(key, "a collective of another engine", at, (), False)
    ranks: list[int] = []
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        ranks = dist.get_process_group_ranks(outermost.f_locals.get("group"))
    is_barrier = called in ("barrier", "monitored_barrier")
    return ForeignCall(key, f"`torch.distributed.{called}`", at, ranks, is_barrier)


def is_the_users(file: str) -> bool:
    """Return whether code of a file is neither torch's nor ours, and no `with` of Python's."""
    return not file.startswith((_TORCH, _OURS, "<frozen", contextlib.__file__))


def user_line(frame: FrameType | None) -> str:
    """Return the innermost line that is neither torch's nor ours."""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_the_users(name):
            return f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
