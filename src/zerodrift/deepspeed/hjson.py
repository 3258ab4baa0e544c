"""Hjson, which DeepSpeed reads its config files as: JSON with comments, loose commas, bare words.

Invariant: a JSON text has the same values as JSON; what is no Hjson is a ValueError with its place.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

_SPACE = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_WORD = re.compile(r"""[^\s,:\[\]{}#"']+""")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ENDS = re.compile(r"[ \t]*(?=$|[,\]}\n\r#]|//|/\*)")
_WORDS = {"true": True, "false": False, "null": None}


def parse(text: str) -> Any:
    """The values of a text, whose outermost braces may be left out."""
    reader = _Reader(text.removeprefix("\ufeff"))
    reader.space()
    value = reader.value() if reader.next() in "{[" else reader.block("")
    reader.space()
    if reader.next():
        reader.fail("one value")
    return value


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def next(self) -> str:
        return self._text[self._at : self._at + 1]

    def space(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def fail(self, what: str) -> NoReturn:
        before = self._text[: self._at]
        line, column = before.count("\n") + 1, self._at - before.rfind("\n")
        got = repr(self.next()) if self.next() else "the end"
        raise ValueError(f"{got} where {what} must be, at line {line}, column {column}")

    def _take(self, sign: str) -> bool:
        if self.next() != sign or not sign:
            return False
        self._at += 1
        return True

    def value(self) -> Any:
        if self._take("{"):
            return self.block("}")
        if self._take("["):
            return self._list()
        if self.next() and self.next() in "\"'":
            return self._quoted()
        return self._bare()

    def block(self, end: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while True:
            self.space()
            if self._take(end) or (not end and not self.next()):
                return values
            key = self._key()
            self.space()
            if not self._take(":"):
                self.fail("a colon")
            self.space()
            if key in values:
                raise ValueError(f"the key {key!r} is there twice")
            values[key] = self.value()
            self.space()
            self._take(",")

    def _list(self) -> list[Any]:
        values: list[Any] = []
        while True:
            self.space()
            if self._take("]"):
                return values
            values.append(self.value())
            self.space()
            self._take(",")

    def _key(self) -> str:
        if self.next() and self.next() in "\"'":
            return self._quoted()
        found = _WORD.match(self._text, self._at)
        if found is None:
            self.fail("a key")
        self._at = found.end()
        return found.group()

    def _quoted(self) -> str:
        quote = self.next()
        if self._text.startswith("'''", self._at):
            end = self._text.find("'''", self._at + 3)
            if end < 0:
                self.fail("a text with its end")
            lines, self._at = self._text[self._at + 3 : end], end + 3
            return "\n".join(line.strip() for line in lines.strip().splitlines())
        found = re.compile(rf"{quote}((?:[^{quote}\\\n]|\\.)*){quote}").match(self._text, self._at)
        if found is None:
            self.fail("a text with its end")
        self._at = found.end()
        inside = found.group(1) if quote == '"' else found.group(1).replace("\\'", "'").replace('"', '\\"')
        return str(json.loads(f'"{inside}"'))

    def _bare(self) -> Any:
        """A number or a word of JSON; anything else is a text to the end of its line."""
        for word, meaning in _WORDS.items():
            if self._text.startswith(word, self._at) and _ENDS.match(self._text, self._at + len(word)):
                self._at += len(word)
                return meaning
        number = _NUMBER.match(self._text, self._at)
        if number is not None and _ENDS.match(self._text, number.end()):
            self._at = number.end()
            return json.loads(number.group())
        end = self._text.find("\n", self._at)
        text = self._text[self._at : end if end >= 0 else len(self._text)].strip()
        if not text or text[0] in ",:[]{}":
            self.fail("a value")
        self._at += len(text)
        return text
