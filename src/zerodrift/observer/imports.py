"""Something to do when a module has been imported, by whomever."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def when_imported(name: str, call: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call with the module, now if it is there; what is returned takes the wish back."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        call(module)
        return lambda: None
    finder = _ImportFinder(name, call)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _ImportFinder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it asks the finders behind it, and runs after what they found is executed."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        # A module that is only asked for, and not imported, will be asked for again.
        for finder in [finder for finder in sys.meta_path if not isinstance(finder, _ImportFinder)]:
            spec = finder.find_spec(name, path, target)
            if spec is None:
                continue
            if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                spec.loader = _Loader(spec.loader, self._imported)
            return spec
        return None

    def _imported(self, module: ModuleType) -> None:
        """Of all who wait for this module."""
        waiting = [
            each for each in sys.meta_path if isinstance(each, _ImportFinder) and each._name == self._name
        ]
        for each in waiting:
            each.leave()
            each._call(module)


class _Loader(importlib.abc.Loader):
    """A loader that tells when it is done, and is the other one in all else."""

    def __init__(self, loader: Any, call: Callable[[ModuleType], None]) -> None:
        self._loader, self._call = loader, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        module.__loader__ = self._loader
        if spec is not None:
            spec.loader = self._loader
        self._loader.exec_module(module)
        self._call(module)
