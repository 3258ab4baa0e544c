"""In this process, `import deepspeed` is zerodrift's drop-in: by `activate`, or from its start by `run`.

For `transformers.Trainer`, `accelerate`, PEFT, TRL and whatever else imports DeepSpeed by its name: they find
the drop-in's modules, and a version of DeepSpeed to compare with, whether DeepSpeed is installed or not. What
`run` was told to add to their configs is kept here for the drop-in, which reads those configs.

Invariant: a module has one instance under both names, so classes and `isinstance` agree; nothing of the
drop-in is imported before somebody asks for it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

from zerodrift.errors import Problem, UnsupportedError
from zerodrift.versions import DEEPSPEED

NAME = "deepspeed"
HOME = "zerodrift.deepspeed"

Milestone = Literal["started", "imported", "initialized"]
"""How far a command has come: a process began, imported the drop-in, made an engine with it."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What a process was started with by `run`."""

    folder: Path
    """Where milestones are left."""
    config: Mapping[str, Any]
    """Keys to add to every config."""
    flags: Mapping[str, str]
    """Path of a key -> the flag that it came by."""

    def reached(self, milestone: Milestone) -> None:
        with contextlib.suppress(OSError):  # the command has ended, and this process has not
            (self.folder / milestone).touch()


def activate() -> None:
    """Answer to `import deepspeed`. Call it before anything imports DeepSpeed, transformers or accelerate;
    calling it again does nothing."""
    if _standing() is None:
        _stand_in("activate", "Call it at the top of the script.", None)


def begin(folder: str, config: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    """The same at the start of a process of `run`."""
    errand = Errand(Path(folder), config, flags)
    _stand_in("zerodrift run", "A .pth file of that Python does it: move or remove that.", errand)
    errand.reached("started")


def errand() -> Errand | None:
    """That of this process; None where `run` has not started it."""
    finder = _standing()
    return None if finder is None else finder.errand


def _standing() -> _Finder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)


def _stand_in(where: str, do: str, errand: Errand | None) -> None:
    there = sys.modules.get(NAME)
    if there is not None:
        raise UnsupportedError(
            where,
            "must be called before DeepSpeed is imported",
            got=f"DeepSpeed from {there.__file__}",
            do=do,
        )
    sys.meta_path.insert(0, _Finder(errand))


class _Finder(importlib.metadata.DistributionFinder):
    """What Python asks for modules, and for distributions: its protocol is a class."""

    def __init__(self, errand: Errand | None) -> None:
        self.errand = errand

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        home = HOME + fullname.removeprefix(NAME)
        spec = importlib.util.find_spec(home)
        if spec is None:
            return None
        return ModuleSpec(fullname, _Same(spec), is_package=spec.submodule_search_locations is not None)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name == NAME:
            yield _Distribution()


class _Same(Loader):
    """Loads a module by handing out another."""

    def __init__(self, home: ModuleSpec) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            module = importlib.import_module(self._home.name)
        except ImportError as error:
            must = f"which is `{NAME}` in this process, must be importable by {sys.executable}"
            raise ImportError(str(Problem("zerodrift", must, got=str(error))), name=error.name) from error
        self._spec = module.__spec__
        given = errand()
        if given is not None:
            given.reached("imported")
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import machinery has written the other name's over it

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m deepspeed.NAME`."""
        return self._home.loader.get_code(self._home.name)  # type: ignore[union-attr]


class _Distribution(importlib.metadata.Distribution):
    """As much of an installed DeepSpeed as others ask for: its name and version."""

    def read_text(self, filename: str) -> str | None:
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        message = Message()
        message["Metadata-Version"] = "2.1"
        message["Name"] = NAME
        message["Version"] = DEEPSPEED
        return str(message)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)
