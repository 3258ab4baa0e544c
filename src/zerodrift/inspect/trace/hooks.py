"""Hooks on other people's code: attributes that are replaced and put back, modules that are waited for.

Nothing here imports torch: it runs at the start of every Python process of a command.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class Patches:
    """Replacements and hooks, undone in the end, the last first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def undo(self, call: Callable[[], Any]) -> None:
        self._undo.append(call)

    def replace(self, holder: Any, name: str, watched: Callable[..., Any]) -> None:
        """Send calls of `holder.name` to `watched`, with the original before their own arguments."""
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
        while self._undo:
            self._undo.pop()()


def when_imported(name: str, call: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call with the module, now if it is imported, or when it is; return how to take that back."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        call(module)
        return lambda: None
    finder = _ImportFinder(name, call)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _ImportFinder(importlib.abc.MetaPathFinder):
    """A finder that asks the finders behind it, and calls back when the module they found was executed."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # A module that is only asked for, and not imported, will be asked for again.
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
        """Call for every finder that waits for this module."""
        for finder in [each for each in sys.meta_path if isinstance(each, _ImportFinder)]:
            if finder._name == self._name:
                finder.leave()
                finder._call(sys.modules[self._name])
