"""Rows out of JSON: lines, the objects of an array, or one object after the other.

Invariant: a row is an object with each key once, and no more than the rows under way is in memory.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from zerodrift.errors import ConfigError, first_line
from zerodrift.train.data.texts import decoded, kind, not_text

Row = dict[str, Any]

_PIECE = 1 << 16


def lines(stream: BinaryIO, file: Path) -> Iterator[tuple[int, Row]]:
    """The objects of lines, with the numbers of these."""
    for number, line in enumerate(stream, 1):
        where = f"{file}:{number}"
        written = decoded(line, where)
        if not written.strip():
            continue
        try:
            value = json.loads(written, object_pairs_hook=_block)
        except json.JSONDecodeError as error:
            raise _no_json(where, _fault(error, f"column {error.colno:,}"), "A line is one object.") from None
        except (ValueError, RecursionError) as error:
            raise _odd_json(where, error) from None
        yield number, _object(value, where)


def values(stream: BinaryIO, file: Path, *, array: bool) -> Iterator[tuple[int, Row]]:
    """The objects of an array, or one after the other; only those under way are in memory."""
    reader = _Characters(stream, file)
    decoder = json.JSONDecoder(object_pairs_hook=_block)
    if array:
        reader.take("[")
        if reader.peek() == "]":
            reader.take("]")
            reader.require_end()
            return
    number = 0
    while array or reader.peek():
        number += 1
        where = f"{file}: row {number:,}"
        yield number, _object(reader.value(decoder, where), where)
        if array and reader.take("],", where) == "]":
            break
    reader.require_end()


class _Characters:
    """A text that is read as far as it is needed."""

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self._stream, self._file = stream, file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._size = "", 0, _PIECE
        self._ended = False

    def _more(self) -> bool:
        if self._ended:
            return False
        piece = self._stream.read(self._size)
        self._ended = not piece
        try:
            self._text = self._text[self._at :] + self._decoder.decode(piece, final=self._ended)
        except UnicodeDecodeError as error:
            raise not_text(error, str(self._file)) from None
        self._at = 0
        return True

    def peek(self) -> str:
        """The next character that is no space; `""` at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._at += 1
            if not self._more():
                return ""

    def take(self, wanted: str, where: str = "") -> str:
        found = self.peek()
        if not found or found not in wanted:
            got = f"{found!r} for {' or '.join(map(repr, wanted))}" if found else "an end in the middle"
            raise _no_json(where or str(self._file), got)
        self._at += 1
        return found

    def value(self, decoder: json.JSONDecoder, where: str) -> Any:
        self.peek()
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # Whether more of it would mend this is not known before there is more.
                if self._ended or not self._grow():
                    raise _no_json(where, _fault(error, f"character {error.pos - self._at:,}")) from None
            except (ValueError, RecursionError) as error:
                raise _odd_json(where, error) from None
            else:
                self._at, self._size = end, _PIECE
                return value

    def _grow(self) -> bool:
        self._size *= 2
        return self._more()

    def require_end(self) -> None:
        if found := self.peek():
            raise _no_json(str(self._file), f"{found!r} after the end")


def _block(pairs: list[tuple[str, Any]]) -> Row:
    block = dict(pairs)
    if len(block) < len(pairs):
        raise ValueError(f"a key twice in {', '.join(repr(key) for key, _ in pairs[:8])}")
    return block


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(where, "must be a JSON object", got=kind(value))
    return value


def _fault(error: json.JSONDecodeError, place: str) -> str:
    more = error.msg == "Extra data"
    return (
        f"more behind the first value, from {place} on"
        if more
        else f"{error.msg.removesuffix(' at')} at {place}"
    )


def _no_json(where: str, got: str, do: str = "") -> ConfigError:
    return ConfigError(where, "must be JSON", got=got, do=do)


def _odd_json(where: str, error: BaseException) -> ConfigError:
    must = "must be JSON of ordinary depth and numbers, each key once"
    return ConfigError(where, must, got=first_line(error))
