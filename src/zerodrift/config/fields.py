"""Reads blocks of keys: which keys there are, what each admits in words, and what its docstring says.

Error messages take their words from here and `reference` its pages, so both describe a key in the same words.
Also here are the annotations of our own, which say one thing to a type checker, what may be written, and
another to pydantic, what is kept. What a key means is not known here.

Invariant: every annotation that a block uses has words; one that has none is an AssertionError.
"""

from __future__ import annotations

import contextlib
import functools
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import CoreSchema, no_info_plain_validator_function

from zerodrift import dtypes as table
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError

FAR = 1000
"""Bounds from here on only keep out mistakes: told to whoever is beyond one, and not on every page."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Of:
    """On an annotation: every spelling of a dtype that a column admits, kept as the `DType`."""

    column: str
    """Of `dtypes.ADMITTED`."""
    only: DType | None = None
    """The one of them that is accepted, where it is one."""

    @property
    def admitted(self) -> tuple[DType, ...]:
        return table.ADMITTED[self.column] if self.only is None else (self.only,)

    def read(self, value: Any) -> DType:
        found: DType | None = None
        if isinstance(value, DType):
            found = value
        elif isinstance(value, str):
            with contextlib.suppress(ConfigError):
                found = table.parse(value)
        if found is None or found not in self.admitted:
            raise ValueError(f"must be one of {', '.join(table.spellings(self.admitted))}")
        return found

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_plain_validator_function(self.read)


@dataclass(frozen=True, slots=True)
class _AsTuple:
    """On the annotation of a tuple or list: kept as the tuple."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(typing.get_args(source)[0])


Items = Annotated[tuple[Item, ...] | list[Item], _AsTuple()]
"""Several of a kind."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the schema."""

    path: str
    """Dotted; the items of a list are written `rules[]`."""
    kind: Any
    """The annotation of its field."""
    doc: str
    """The docstring under its field, on one line."""


@functools.cache
def fields(block: type[BaseModel]) -> dict[str, Any]:
    """The names that a user writes in a block, with the annotations of their fields."""
    hints = typing.get_type_hints(block, include_extras=True)
    return {spelled(name, field): hints[name] for name, field in block.model_fields.items()}


def spelled(name: str, field: FieldInfo) -> str:
    """A field's name in files and dicts, where `class` is a name as any other."""
    return field.validation_alias if isinstance(field.validation_alias, str) else name


def every_key(block: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every key under a block, depth first; a key that holds a block comes before the keys in it."""
    docs = {spelled(name, field): field.description or "" for name, field in block.model_fields.items()}
    for name, kind in fields(block).items():
        path = prefix + name
        yield Key(path, kind, " ".join(docs[name].split()))
        inner, item = block_of(kind), item_of(kind)
        if inner is not None:
            yield from every_key(inner, f"{path}.")
        elif item is not None and (inner := block_of(item)) is not None:
            yield from every_key(inner, f"{path}[].")


def block_of(kind: Any) -> type[BaseModel] | None:
    """The block that a key may hold."""
    for option, _ in _options(kind):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def item_of(kind: Any) -> Any | None:
    """What the items of a list are, for a key that may hold a list."""
    for option, _ in _options(kind):
        if typing.get_origin(option) is tuple:
            return typing.get_args(option)[0]
    return None


def is_free(kind: Any) -> bool:
    """Whether a key holds a block of names that the schema does not know: an optimizer's arguments."""
    return any(typing.get_origin(option) is dict for option, _ in _options(kind))


def kind_at(path: Sequence[str | int], root: type[BaseModel]) -> Any | None:
    """The annotation at a path, list indices included; None for a path that leaves the schema."""
    kind: Any = root
    for part in path:
        if isinstance(part, int):
            kind = item_of(kind)
        else:
            block = block_of(kind)
            kind = _kind(block, part) if block is not None else None
        if kind is None:
            return None
    return kind


def _kind(block: type[BaseModel], name: str) -> Any | None:
    """The annotation of a field, by either of its names."""
    known = fields(block)
    return known.get(name) or (
        known[spelled(name, block.model_fields[name])] if name in block.model_fields else None
    )


def admits(kind: Any) -> str:
    """What a key may hold, in words that follow "must be"."""
    words = [text for option, extras in _options(kind) for text in _words(option, extras)]
    return either(words)


def must(kind: Any, value: object) -> str:
    """What must hold of a key that does not accept a value, as a clause: what it admits, or how large it may
    be where a number was too large."""
    most = [
        bound.le
        for option, extras in _options(kind)
        for extra in extras
        for bound in _bounds(extra)
        if isinstance(bound, Le) and option in (int, float)
    ]
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if numeric and most and value > min(most) >= FAR:  # type: ignore[operator, type-var]
        return f"must be at most {min(most):,}"  # type: ignore[type-var]
    return f"must be {admits(kind)}"


def choices(kind: Any) -> list[str]:
    """The words that a key admits, for the nearest of them."""
    return [
        value
        for option, _ in _options(kind)
        if typing.get_origin(option) is Literal
        for value in typing.get_args(option)
        if isinstance(value, str)
    ]


def either(words: Sequence[str]) -> str:
    """`a, b or c`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _options(kind: Any, extras: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The alternatives of an annotation with their constraints; `None`, "not written", is left out."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        inner, *more = typing.get_args(kind)
        if any(isinstance(extra, Of) for extra in more):
            inner = DType
        elif any(isinstance(extra, _AsTuple) for extra in more):
            inner = typing.get_args(inner)[0]
        yield from _options(inner, (*extras, *more))
    elif origin in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            yield from _options(option, extras)
    elif kind is not type(None):
        yield kind, extras


def _words(option: Any, extras: tuple[Any, ...]) -> list[str]:
    origin = typing.get_origin(option)
    if origin is Literal:
        return [_literal(value) for value in typing.get_args(option)]
    if origin is tuple:
        return [f"a list of {_plural(typing.get_args(option)[0])}"]
    if origin is dict:
        return ["a block of arguments"]
    if isinstance(option, type):
        if issubclass(option, BaseModel):
            return ["a block of keys"]
        if option is bool:
            return ["true", "false"]
        if option is DType:
            return [str(dtype) for dtype in _admitted(extras)]
        if option in (int, float):
            return _number(option, extras)
        if option is str:
            return ["a string"]
    raise AssertionError(f"no words for {option!r}")


def dtypes(kind: Any) -> tuple[DType, ...]:
    """The dtypes that a key admits."""
    return tuple(dtype for _, extras in _options(kind) for dtype in _admitted(extras))


def _admitted(extras: tuple[Any, ...]) -> tuple[DType, ...]:
    return tuple(dtype for extra in extras if isinstance(extra, Of) for dtype in extra.admitted)


def _plural(item: Any) -> str:
    if block_of(item) is not None:
        return "blocks of keys" if admits(item) == "a block of keys" else "strings or blocks of keys"
    if item is str:
        return "strings"
    if admits(item) == "a whole number above 0":
        return "whole numbers above 0"
    raise AssertionError(f"no words for a list of {item!r}")


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, DType) else f'"{value}"'


def _number(option: type, extras: tuple[Any, ...]) -> list[str]:
    noun = "a whole number" if option is int else "a number"
    bounds = [bound for extra in extras for bound in _bounds(extra)]
    above = next((bound.gt for bound in bounds if isinstance(bound, Gt)), None)
    least: Any = next((bound.ge for bound in bounds if isinstance(bound, Ge)), None)
    most: Any = next((bound.le for bound in bounds if isinstance(bound, Le)), None)
    if least is not None and most is not None and most < FAR:
        if option is int and most - least < 5:
            return [str(value) for value in range(least, most + 1)]
        return [f"{noun} from {least} to {most}"]
    if above is not None:
        return [f"{noun} above {above}" + (f" and at most {most}" if most is not None and most < FAR else "")]
    return [f"{noun} of at least {least}" if least is not None else noun]


def _bounds(extra: Any) -> Sequence[Any]:
    return extra.metadata if isinstance(extra, FieldInfo) else (extra,)
