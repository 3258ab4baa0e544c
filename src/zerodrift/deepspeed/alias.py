"""`activate`: from now on, `import deepspeed` in this process is the drop-in.

For `transformers.Trainer`, `accelerate`, PEFT, TRL and whatever else imports DeepSpeed by its name: they find
the drop-in's modules, and a version of DeepSpeed to compare with, whether DeepSpeed is installed or not.

Invariant: a module has one instance under both names, so classes and `isinstance` agree.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from email.message import Message
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from zerodrift.errors import UnsupportedError

NAME = "deepspeed"
HOME = "zerodrift.deepspeed"


def activate() -> None:
    """Answer to `import deepspeed`. Call it before anything imports DeepSpeed, transformers or accelerate;
    calling it again does nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    there = sys.modules.get(NAME)
    if there is not None:
        raise UnsupportedError(
            "activate",
            "must be called before DeepSpeed is imported",
            got=f"DeepSpeed from {there.__file__}",
            do="Call it at the top of the script.",
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.metadata.DistributionFinder):
    """What Python asks for modules, and for distributions: its protocol is a class."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        home = HOME + fullname.removeprefix(NAME)
        spec = importlib.util.find_spec(home)
        if spec is None:
            return None
        return ModuleSpec(fullname, _Same(home), is_package=spec.submodule_search_locations is not None)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name == NAME:
            yield _Distribution()


class _Same(Loader):
    """Loads a module by handing out another."""

    def __init__(self, home: str) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import machinery has written the other name's over it


class _Distribution(importlib.metadata.Distribution):
    """As much of an installed DeepSpeed as others ask for: its name and version."""

    def read_text(self, filename: str) -> str | None:
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        message = Message()
        message["Metadata-Version"] = "2.1"
        message["Name"] = NAME
        message["Version"] = importlib.import_module(HOME).__version__
        return str(message)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)
