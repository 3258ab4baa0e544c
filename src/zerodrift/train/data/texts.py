"""Bytes as text, and values as words.

Invariant: no character of a text is one that was made up for what could not be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerodrift.errors import ConfigError, said


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """What the system says no to is an error that names the file."""
    try:
        yield
    except OSError as error:
        got = error.strerror or said(error)
        raise ConfigError(str(file), "must be readable", got=got) from None


def decoded(data: bytes, where: str) -> str:
    """UTF-8 as text, without the mark that editors put in front."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_text(error, where) from None


def not_text(error: UnicodeDecodeError, where: str, before: int = 0) -> ConfigError:
    """That bytes are no UTF-8, and where; `before` is how many came before these."""
    got = f"byte 0x{error.object[error.start]:02x} at offset {before + error.start:,}"
    return ConfigError(where, "must be UTF-8 text", got=got, do="Leave it out, or save it as UTF-8.")


def without_zeros(text: str, where: str, before: int = 0) -> str:
    """A text, where it is one: binary files are full of zeros. `before` is the characters in front of it."""
    if "\0" in text:
        got = f"a zero at character {before + text.index(chr(0)):,}"
        todo = "It is binary, or UTF-16: leave it out, or save it as UTF-8."
        raise ConfigError(where, "must be text", got=got, do=todo)
    return text


def kind(value: Any) -> str:
    """What a value is, in the words of files and not of Python."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    if value is None:
        return "null"
    if isinstance(value, list) and not value:
        return "an empty list"
    return "a block of keys" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)
