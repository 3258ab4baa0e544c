"""Attributes of libraries that are replaced while a run is watched, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """What is to be undone, the last first."""

    def __init__(self) -> None:
        self._undone: list[Callable[[], Any]] = []

    def undo(self, what: Callable[[], Any]) -> None:
        """Call this in the end."""
        self._undone.append(what)

    def replace(self, holder: Any, name: str, watched: Callable[..., Any]) -> None:
        """Calls of `holder.name` go to `watched`, with the original before their own arguments."""
        original = getattr(holder, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return watched(original, *args, **kwargs)

        own = name in vars(holder)
        setattr(holder, name, call)

        def restore() -> None:
            if getattr(holder, name, None) is call:
                if own:
                    setattr(holder, name, original)
                else:
                    delattr(holder, name)

        self.undo(restore)

    def restore(self) -> None:
        while self._undone:
            self._undone.pop()()
