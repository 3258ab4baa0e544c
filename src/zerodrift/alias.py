"""Import hook that makes `import deepspeed` import zerodrift's drop-in in this process.

`activate` or `zerodrift run` installs the hook. Libraries that import `deepspeed` then find the drop-in and
a version of DeepSpeed, whether DeepSpeed is installed or not.

Invariant: a module has one instance under both names, so that `isinstance` agrees. The drop-in is imported on
first use.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Progress of a command: a process started, imported the drop-in, or made an engine."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a process that `zerodrift run` started."""

    folder: Path
    """Folder of the milestone files."""
    config: Mapping[str, Any]
    """Keys to add to every config."""
    flags: Mapping[str, str]
    """Path of each added key -> the flag that set it."""
    shown: str = "brief"
    """Lines of a plan to print: `brief`, `plan` for all, or `none`."""

    def mark_reached(self, milestone: Milestone) -> None:
        with contextlib.suppress(OSError):  # the process outlived the command
            (self.folder / milestone).touch()


def activate() -> None:
    """Make `import deepspeed` import zerodrift. Call this before DeepSpeed, transformers or accelerate is
    imported. A second call does nothing."""
    if _installed_finder() is None:
        _install_finder("activate", "Call it at the top of the script.", None)


def begin(folder: str, config: Mapping[str, Any], flags: Mapping[str, str], shown: str) -> None:
    """Make `import deepspeed` import zerodrift in a process of `zerodrift run`."""
    settings = RunSettings(Path(folder), config, flags, shown)
    _install_finder("zerodrift run", "A .pth file of that Python imports it: remove that file.", settings)
    settings.mark_reached("started")


def run_settings() -> RunSettings | None:
    """Return the settings of this process, or None if `zerodrift run` did not start it."""
    finder = _installed_finder()
    return None if finder is None else finder.settings


def _installed_finder() -> _Finder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)


def _install_finder(where: str, do: str, settings: RunSettings | None) -> None:
    imported = sys.modules.get(NAME)
    if imported is not None:
        must, got = "must be called before DeepSpeed is imported", f"DeepSpeed from {imported.__file__}"
        raise UnsupportedError(where, must, got=got, do=do)
    sys.meta_path.insert(0, _Finder(settings))


class _Finder(importlib.metadata.DistributionFinder):
    """Finder of the modules and the distribution `deepspeed`."""

    def __init__(self, settings: RunSettings | None) -> None:
        self.settings = settings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        home = HOME + fullname.removeprefix(NAME)
        spec = importlib.util.find_spec(home)
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(spec), origin=spec.origin, is_package=is_package)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name == NAME:
            yield _Distribution()


class _AliasLoader(Loader):
    """Loader that returns a module of the drop-in under its DeepSpeed name."""

    def __init__(self, home: ModuleSpec) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            module = importlib.import_module(self._home.name)
        except ImportError as error:
            must = f"which is `{NAME}` in this process, must be importable by {sys.executable}"
            raise ImportError(str(Problem("zerodrift", must, got=str(error))), name=error.name) from error
        self._spec = module.__spec__
        settings = run_settings()
        if settings is not None:
            settings.mark_reached("imported")
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import machinery has replaced it

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code for `python -m deepspeed.NAME`."""
        return self._home.loader.get_code(self._home.name)  # type: ignore[union-attr]


class _Distribution(importlib.metadata.Distribution):
    """Distribution with the name and version of DeepSpeed."""

    def read_text(self, filename: str) -> str | None:
        if filename not in ("METADATA", "PKG-INFO"):
            return None
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {DEEPSPEED}\n\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)
