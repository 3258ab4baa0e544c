"""Faces of rooms: the names that a folder offers to the others, loaded on first use.

A room's `__init__.py` lists its face as imports under `TYPE_CHECKING`, for type checkers and for people.
`face` reads the same list, so a room is imported without its files, and what comes before the plan needs no
torch.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any


def face(room: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a room's `__getattr__`, `__dir__` and `__all__`, from the imports in its `__init__.py`."""
    homes = homes_of(pkgutil.get_data(room, "__init__.py") or b"")

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        module = importlib.import_module(home)
        if home == room or not hasattr(module, name):  # a file, which its folder has not imported yet
            return importlib.import_module(f"{home}.{name}")
        return getattr(module, name)

    return load, lambda: sorted(homes), sorted(homes)


def homes_of(source: bytes) -> dict[str, str]:
    """Return the modules of the names that are imported under `TYPE_CHECKING`."""
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}
