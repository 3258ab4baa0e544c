"""The drop-in's errors, and placeholders for names that DeepSpeed has and this package has not.

Scripts import more than they use, and ask `isinstance(model, PipelineModule)` of other models. A placeholder
can therefore be imported and derived from, nothing is an instance of it, and a call raises an error that
names it and says what to use instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, Union

from zerodrift.errors import CheckpointError, ConfigError, UnsupportedError, did_you_mean

HERE = "must be a name of the drop-in"


class NotHereError(UnsupportedError, AttributeError):
    """A name of DeepSpeed that is not here. `hasattr` returns False for it."""


class MisuseError(UnsupportedError, AssertionError):
    """A call that DeepSpeed refuses by an assertion, which scripts may catch."""


class RefusedConfigError(ConfigError, AssertionError, ValueError):
    """A config that `initialize` refuses. DeepSpeed asserts, and its schema raises ValueErrors."""


class MissingCheckpointError(CheckpointError, FileNotFoundError, AssertionError, ValueError):
    """A checkpoint that does not exist. DeepSpeed's `load_checkpoint` asserts; its `zero_to_fp32` raises a
    FileNotFoundError for a tag and a ValueError for a missing `latest`."""


def absent(name: str, instead: str) -> NotHereError:
    """Return the error for an attribute that DeepSpeed has."""
    return NotHereError(name, HERE, got="one of DeepSpeed's alone", do=instead)


def unknown(owner: str, name: str, known: Iterable[str]) -> NotHereError:
    """Return the error for a name that neither DeepSpeed nor the drop-in has."""
    return NotHereError(f"{owner}.{name}", HERE, do=did_you_mean(name, list(known)))


class _PlaceholderBase:
    """The base of classes that a script derives from a placeholder. Making an instance raises."""

    placeholder: Placeholder

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls.placeholder()


class Placeholder:
    """Stands in for a function or class of DeepSpeed."""

    def __init__(self, name: str, instead: str) -> None:
        self._name = name
        self._instead = instead
        self.__module__, _, self.__name__ = name.rpartition(".")
        self.__qualname__ = self.__name__
        self._base = type(self.__name__, (_PlaceholderBase,), {"placeholder": self})

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(self._name, HERE, got="one of DeepSpeed's alone", do=self._instead)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._base,)

    def __instancecheck__(self, value: object) -> bool:
        return False

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, self._base)

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007 (`|` would call this method again)

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007

    def __repr__(self) -> str:
        return f"<`{self._name}` is not in zerodrift: {self._instead}>"
