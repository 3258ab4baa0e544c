"""Make DeepSpeed's modules from the tables in `names.py`.

A finder behind Python's own makes `zerodrift.deepspeed.X` for every module `X` of the tables. Present names
are bound when the module is made. Absent names become placeholders, and any other name raises an error with
the nearest known one.

Invariant: a name that DeepSpeed documents never raises a bare AttributeError or ModuleNotFoundError.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from zerodrift.deepspeed.errors import Placeholder, unknown
from zerodrift.deepspeed.names import ABSENT_MODULES, ABSENT_NAMES, LOWER_CASE, PRESENT, ROOT

HOME = "zerodrift.deepspeed"


def read_table(table: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return for each module of a table its names, each with the text of the table."""
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for text, lines in table.items():
        for line in textwrap.dedent(lines).strip().replace("\n    ", " ").splitlines():
            listed, _, names = line.partition(":")
            for module in listed.split():
                modules[module] |= dict.fromkeys(names.split(), text)
    return modules


NAMES_HERE = read_table(PRESENT)
NAMES_ABSENT = read_table(ABSENT_NAMES)
MODULES_ABSENT = {name: text for text, names in ABSENT_MODULES.items() for name in names.split()}
MODULES = (NAMES_HERE.keys() | NAMES_ABSENT.keys() | MODULES_ABSENT.keys()) - {ROOT}


def children(module: str) -> list[str]:
    """Return the last names of the modules directly below a module of DeepSpeed."""
    start = "" if module == ROOT else f"{module}."
    below = [name.removeprefix(start) for name in sorted(MODULES) if name.startswith(start)]
    return list(dict.fromkeys(name.partition(".")[0] for name in below))


def lookup(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of DeepSpeed."""
    package = HOME if module == ROOT else f"{HOME}.{module}"
    absent, reason, below = NAMES_ABSENT.get(module, {}), MODULES_ABSENT.get(module), children(module)

    @functools.cache
    def look_up(name: str) -> Any:
        if name in below:
            return importlib.import_module(f"{package}.{name}")
        instead = absent.get(name, None if name.startswith("_") else reason)
        if instead is not None:
            return Placeholder(f"{package.removeprefix('zerodrift.')}.{name}", instead)
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        here = getattr(sys.modules[package], "__all__", ())
        raise unknown(package, name, [*here, *below, *absent])

    return look_up


class DeepSpeedModules(MetaPathFinder, Loader):
    """Finds and makes the modules of the tables."""

    @classmethod
    def install(cls) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())  # a folder with nothing but a cache in it would be found first

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = name.removeprefix(f"{HOME}.")
        if module == name or module not in MODULES:
            return None
        home = NAMES_HERE.get(module, {}).get("main")
        origin = None if home is None else str(Path(__file__).with_name(f"{home}.py"))
        return ModuleSpec(name, self, origin=origin, is_package=bool(children(module)))

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(f"{HOME}.")
        names = NAMES_HERE.get(name, {})
        reason = MODULES_ABSENT.get(name)
        module.__doc__ = (
            f"`deepspeed.{name}`." if reason is None else f"Nothing of `deepspeed.{name}`. {reason}"
        )
        for child in names.keys() & set(children(name)):
            importlib.import_module(f"{module.__name__}.{child}")  # before the name that hides it is bound
        values = {entry.partition("=")[0]: _value(entry, home) for entry, home in names.items()}
        vars(module).update(values)
        vars(module)["__all__"] = [each for each in values if not each.startswith("_")]
        vars(module)["__getattr__"] = lookup(name)

    def get_code(self, name: str) -> CodeType | None:
        """Return the code of the file that has the module's `main`, for `python -m`."""
        home = NAMES_HERE[name.removeprefix(f"{HOME}.")].get("main")
        spec = None if home is None else importlib.util.find_spec(f"{HOME}.{home}")
        return None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]


def _value(entry: str, home: str) -> Any:
    name, _, other = entry.partition("=")
    if home == LOWER_CASE:
        return name.lower()
    module = importlib.import_module(home if "." in home else f"{HOME}.{home}")
    return getattr(module, other or name)
