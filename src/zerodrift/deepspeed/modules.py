"""Make DeepSpeed's modules from the tables in `tables.py`.

An import hook makes `zerodrift.deepspeed.X` for every module `X` of the tables. Present names are bound when
the module is made. Absent names become placeholders, because scripts import more names than they use: a
placeholder can be imported, derived from, and passed to `isinstance`; using it raises an error with advice.
Any other name raises an error with the nearest known one.

Invariant: a name that DeepSpeed documents never raises a bare AttributeError or ModuleNotFoundError.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn, Union

from zerodrift.deepspeed.tables import ABSENT, ENGINE, LOWER_CASE, PARAMETER, PRESENT, RETURNS, ROOT
from zerodrift.errors import CheckpointError, ConfigError, UnsupportedError, did_you_mean

HERE = "must be a name of the drop-in"


class NotHereError(UnsupportedError, AttributeError):
    """A name of DeepSpeed that zerodrift does not have. `hasattr` returns False for it."""


class MisuseError(UnsupportedError, AssertionError):
    """A call for which DeepSpeed raises an AssertionError, which scripts may catch."""


class RefusedConfigError(ConfigError, AssertionError, ValueError):
    """A config for which DeepSpeed raises an AssertionError or, from its schema, a ValueError."""


class MissingCheckpointError(CheckpointError, FileNotFoundError, AssertionError, ValueError):
    """A checkpoint that does not exist. DeepSpeed raises an AssertionError in `load_checkpoint`. In
    `zero_to_fp32` it raises a FileNotFoundError for a tag and a ValueError for a missing `latest`."""


def absent(name: str, instead: str) -> NotHereError:
    """Return the error for an attribute that DeepSpeed has."""
    return NotHereError(name, HERE, got="one that only DeepSpeed has", do=instead)


def unknown(owner: str, name: str, known: Iterable[str]) -> NotHereError:
    """Return the error for a name that neither DeepSpeed nor the drop-in has."""
    return NotHereError(f"{owner}.{name}", HERE, do=did_you_mean(name, list(known)))


class _PlaceholderBase:
    """Base of the classes that a script derives from a placeholder. Instantiating them raises."""

    placeholder: Placeholder

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls.placeholder()


class Placeholder:
    """Stands in for a function, class or module of DeepSpeed, and for every name in it."""

    def __init__(self, name: str, instead: str) -> None:
        self._name = name
        self._instead = instead
        self.__module__, _, self.__name__ = name.rpartition(".")
        self.__qualname__ = self.__name__
        self._base = type(self.__name__, (_PlaceholderBase,), {"placeholder": self})

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("_"):
            raise AttributeError(name)
        made = Placeholder(f"{self._name}.{name}", self._instead)
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(self._name, HERE, got="one that only DeepSpeed has", do=self._instead)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._base,)

    def __instancecheck__(self, value: object) -> bool:
        return False

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, self._base)

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007 (`|` would call this method again)

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<`{self._name}` is not in zerodrift: {self._instead}>"


# --- modules ----------------------------------------------------------------------------------------------

HOME = "zerodrift.deepspeed"
FOLDER = Path(__file__).parent
OUTSIDE = ("torch.", "zerodrift.")
"""Prefixes of homes outside this folder."""


def read_table(table: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return two maps of a table: module -> name -> heading, and module listed without names -> heading."""
    names: dict[str, dict[str, str]] = defaultdict(dict)
    bare: dict[str, str] = {}
    heading = ""
    for line in table.strip().replace("\n        ", " ").splitlines():
        if not line.startswith(" "):
            heading = line
            continue
        listed, _, held = line.partition(":")
        for module in listed.split():
            if held:
                names[module] |= dict.fromkeys(held.split(), heading)
            else:
                bare[module] = heading
    return names, bare


NAMES_HERE, _ = read_table(PRESENT)
NAMES_ABSENT, MODULES_ABSENT = read_table(ABSENT)
ENGINE_ABSENT, PARAMETER_ABSENT = NAMES_ABSENT.pop(ENGINE), NAMES_ABSENT.pop(PARAMETER)
_LISTED = (NAMES_HERE.keys() | NAMES_ABSENT.keys() | MODULES_ABSENT.keys()) - {ROOT}
MODULES = {".".join(parts[:n]) for parts in (m.split(".") for m in _LISTED) for n in range(1, len(parts) + 1)}
"""Modules that are listed, and their packages."""


def children(module: str) -> list[str]:
    """Return the last names of the modules directly below a module of DeepSpeed."""
    return sorted(n.rpartition(".")[2] for n in MODULES if (n.rpartition(".")[0] or ROOT) == module)


def advice(module: str) -> str | None:
    """Return the advice for a module of which zerodrift has nothing, its own or that of its package."""
    while module and module not in MODULES:
        module = module.rpartition(".")[0]
    return MODULES_ABSENT.get(module)


def lookup(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of DeepSpeed."""
    package = HOME if module == ROOT else f"{HOME}.{module}"
    absent, reason, below = NAMES_ABSENT.get(module, {}), advice(module), children(module)

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
    @classmethod
    def install(cls) -> None:
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            # First, because Python's own finder accepts a folder that holds nothing but a cache.
            sys.meta_path.insert(0, cls())

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = name.removeprefix(f"{HOME}.")
        if module == name or (module not in MODULES and advice(module) is None):
            return None
        home = NAMES_HERE.get(module, {}).get("main")
        origin = None if home is None else str(FOLDER.joinpath(*home.split(".")).with_suffix(".py"))
        return ModuleSpec(name, self, origin=origin, is_package=bool(children(module) or advice(module)))

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(f"{HOME}.")
        names = NAMES_HERE.get(name, {})
        reason = advice(name)
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
        return (other or name).lower()
    if home.startswith(RETURNS):
        return _returns(home.removeprefix(RETURNS))
    module = importlib.import_module(home if home.startswith(OUTSIDE) else f"{HOME}.{home}")
    return getattr(module, other or name)


@functools.cache
def _returns(text: str) -> Callable[..., Any]:
    """Return the one function that returns this value for any arguments."""
    value = ast.literal_eval(text)
    return lambda *args, **kwargs: value
