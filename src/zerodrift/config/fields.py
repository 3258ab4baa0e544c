"""Describe blocks of keys: their names, the values that each key admits, and its docstring.

Error messages and the pages of `reference` take their words from this file, so both describe a key alike. The
annotations of our own are here too: a type checker sees the spellings that may be written, and pydantic the
value that is kept.

Invariant: every annotation that a block uses has words; an annotation without words is an AssertionError.
"""

from __future__ import annotations

import contextlib
import functools
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, GetCoreSchemaHandler, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import CoreSchema, no_info_plain_validator_function

from zerodrift import dtypes as table
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, listed

SANITY_BOUND = 1000
"""Upper bounds from here on only catch mistakes: messages name such a bound, pages leave it out."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ColumnDType:
    """Annotation of a dtype key: accepts every spelling that a column admits, and keeps the `DType`."""

    column: str
    """A key of `dtypes.ADMITTED`."""
    only: DType | None = None
    """The only dtype that is accepted; None admits all of the column."""

    @property
    def admitted(self) -> tuple[DType, ...]:
        return table.ADMITTED[self.column] if self.only is None else (self.only,)

    def read(self, value: Any) -> DType:
        found = value if isinstance(value, DType) else None
        if isinstance(value, str):
            with contextlib.suppress(ConfigError):
                found = table.parse_among(value, self.admitted)
        if found not in self.admitted:
            raise ValueError(f"must be one of {', '.join(table.spellings(self.admitted))}")
        return found

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_plain_validator_function(self.read)


@dataclass(frozen=True, slots=True)
class _AsTuple:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(typing.get_args(source)[0])


Items = Annotated[tuple[Item, ...] | list[Item], _AsTuple()]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the schema."""

    path: str
    """Dotted; the items of a list are written `rules[]`."""
    kind: Any
    doc: str


@functools.cache
def fields(block: type[BaseModel]) -> dict[str, Any]:
    """Return the keys of a block, as a user writes them, with the annotations of their fields."""
    hints = typing.get_type_hints(block, include_extras=True)
    return {spell_field(name, field): hints[name] for name, field in block.model_fields.items()}


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of the values of a key."""
    return TypeAdapter(kind)


def spell_field(name: str, field: FieldInfo) -> str:
    """Return the name of a field in files and dicts, where `class` is an ordinary name."""
    return field.validation_alias if isinstance(field.validation_alias, str) else name


def every_key(block: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield every key under a block, depth first; a key that holds a block precedes the keys in it."""
    docs = {spell_field(name, field): field.description or "" for name, field in block.model_fields.items()}
    for name, kind in fields(block).items():
        path = prefix + name
        yield Key(path, kind, " ".join(docs[name].split()))
        inner, item = block_of(kind), item_of(kind)
        if inner is not None:
            yield from every_key(inner, f"{path}.")
        elif item is not None and (inner := block_of(item)) is not None:
            yield from every_key(inner, f"{path}[].")


def block_of(kind: Any) -> type[BaseModel] | None:
    """Return the block that a key may hold, or None."""
    blocks = (o for o, _ in _options(kind) if isinstance(o, type) and issubclass(o, BaseModel))
    return next(blocks, None)


def item_of(kind: Any) -> Any | None:
    """Return the annotation of the items, for a key that may hold a list; None for any other key."""
    items = (typing.get_args(o)[0] for o, _ in _options(kind) if typing.get_origin(o) is tuple)
    return next(items, None)


def is_free(kind: Any) -> bool:
    """Return True if a key holds a block of names that the schema does not know: an optimizer's arguments."""
    return any(typing.get_origin(option) is dict for option, _ in _options(kind))


def admits(kind: Any) -> str:
    """Describe the values that a key admits, in words that follow "must be"."""
    words = [text for option, extras in _options(kind) for text in _words(option, extras)]
    return listed(words, "or")


def must(kind: Any, value: object) -> str:
    """Return the requirement that a value violates: the values that the key admits, or its upper bound."""
    numbers = (extras for option, extras in _options(kind) if option in (int, float))
    most: list[Any] = [bound.le for extras in numbers for bound in _bounds(extras) if isinstance(bound, Le)]
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if numeric and most and value > min(most) >= SANITY_BOUND:
        return f"must be at most {min(most):,}"
    return f"must be {admits(kind)}"


def choices(kind: Any) -> list[str]:
    literals = (option for option, _ in _options(kind) if typing.get_origin(option) is Literal)
    return [v for literal in literals for v in typing.get_args(literal) if isinstance(v, str)]


def _options(kind: Any, extras: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the alternatives of an annotation with their constraints, except `None` (not written)."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        inner, *more = typing.get_args(kind)
        if any(isinstance(extra, ColumnDType) for extra in more):
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
        # The text of a flag as JSON spells it, and of a dtype without quotes.
        return [str(v) if isinstance(v, DType) else json.dumps(v) for v in typing.get_args(option)]
    if origin is tuple:
        return [f"a list of {_PLURALS[admits(typing.get_args(option)[0])]}"]
    if origin is dict:
        return ["a block of arguments"]
    if isinstance(option, type):
        if issubclass(option, BaseModel):
            return ["a block of keys"]
        if option is bool:
            return ["true", "false"]
        if option is DType:
            admitted = _admitted(extras)
            return [table.word(dtype, admitted) for dtype in admitted]
        if option in (int, float):
            return _number(option, extras)
        if option is str:
            return ["a string"]
    raise AssertionError(f"no words for {option!r}")


_PLURALS = {
    "a block of keys": "blocks of keys",
    "a string or a block of keys": "strings or blocks of keys",
    "a string": "strings",
    "a whole number above 0": "whole numbers above 0",
}


def dtypes(kind: Any) -> tuple[DType, ...]:
    return tuple(dtype for _, extras in _options(kind) for dtype in _admitted(extras))


def _admitted(extras: tuple[Any, ...]) -> tuple[DType, ...]:
    return tuple(dtype for extra in extras if isinstance(extra, ColumnDType) for dtype in extra.admitted)


def _number(option: type, extras: tuple[Any, ...]) -> list[str]:
    noun = "a whole number" if option is int else "a number"
    bounds = _bounds(extras)
    above = next((bound.gt for bound in bounds if isinstance(bound, Gt)), None)
    least: Any = next((bound.ge for bound in reversed(bounds) if isinstance(bound, Ge)), None)
    upper: list[Any] = [bound.le for bound in bounds if isinstance(bound, Le)]
    most = upper[0] if upper and upper[0] < SANITY_BOUND else None
    if least is not None and most is not None:
        if option is int and most - least < 5:
            return [str(value) for value in range(least, most + 1)]
        return [f"{noun} from {least} to {most}"]
    if above is not None:
        return [f"{noun} above {above}" + (f" and at most {most}" if most is not None else "")]
    return [f"{noun} of at least {least}" if least is not None else noun]


def _bounds(extras: tuple[Any, ...]) -> list[Any]:
    return [b for extra in extras for b in (extra.metadata if isinstance(extra, FieldInfo) else (extra,))]
