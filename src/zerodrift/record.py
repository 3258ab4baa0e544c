"""Codec between frozen dataclasses and JSON values, driven by annotations.

Enums become their values, tuples become lists and sets become sorted lists. A field with
`metadata={"omitted": True}` is left out while it has its default, so that a new field changes no old JSON or
digest. With `metadata={"omitted": "always"}` it is always left out.

Invariant: `decode(type(x), encode(x)) == x`, except fields that are always left out.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def encode(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {
            field.name: encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not _is_omitted(field, getattr(value, field.name))
        }
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(encode(item) for item in value)
    return value


def decode(kind: type[T], data: Any) -> T:
    """Convert JSON values to a value annotated as `kind`, the inverse of `encode`."""
    return _decode(kind, data)


def _is_omitted(field: dataclasses.Field[Any], value: Any) -> bool:
    omitted = field.metadata.get("omitted")
    return omitted == "always" or (omitted is True and value == field.default)


@functools.cache
def _left_out(kind: Any) -> frozenset[str]:
    """Return the fields that may be missing from JSON."""
    return frozenset(field.name for field in dataclasses.fields(kind) if field.metadata.get("omitted"))


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _decode(kind: Any, data: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        (kind,) = (option for option in typing.get_args(kind) if option is not type(None))
        return _decode(kind, data)
    if origin is tuple:
        items = typing.get_args(kind)
        if len(items) == 2 and items[1] is Ellipsis:
            return tuple(_decode(items[0], item) for item in data)
        return tuple(_decode(item, value) for item, value in zip(items, data, strict=True))
    if origin is frozenset:
        return frozenset(_decode(typing.get_args(kind)[0], item) for item in data)
    if origin is typing.Literal or kind is Any:
        return data
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        given = {n: hint for n, hint in _fields(kind).items() if n in data or n not in _left_out(kind)}
        return kind(**{name: _decode(hint, data[name]) for name, hint in given.items()})
    return float(data) if kind is float else data
