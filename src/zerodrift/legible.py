"""Somebody's text as it may be printed: what a terminal would obey is escaped, what never ends is cut.

Names of parameters, classes, files and config keys come from models and files of other people. Every text
that a person reads goes through here on its way: the message of an error, a cell of a report, an element of
a page. JSON does not: it has escapes of its own and stays exact.

Invariant: what is returned is one line of printable characters, of bounded length; what was so already is
returned as it is, so it does no harm twice.
"""

from __future__ import annotations

import re

WORD = 240
"""Characters without a blank between them that are shown whole: a path, a name, a list of names."""

LINE = 8_000
"""Characters that are shown at all."""

_LONG = re.compile(rf"\S{{{WORD + 1},}}")

_PLAIN = str.maketrans({"─": "-", "█": "#"})
"""For terminals that cannot show the drawing characters."""


def legible(text: str) -> str:
    """`text` on one line: with escapes for what is not printable, without the middle of what is too long."""
    if len(text) > 4 * LINE:
        text = _cut(text, 2 * LINE)
    if not text.isprintable():
        text = "".join(map(_escaped, text))
    if len(text) > WORD:
        text = _LONG.sub(lambda match: _cut(match[0], WORD), text)
    return _cut(text, LINE)


def encodable(text: str, encoding: str | None) -> str:
    """`text` in what a stream can show: what it cannot is replaced."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text


def lines(text: str) -> str:
    """The same for a text of several lines, which stay lines."""
    return "\n".join(map(legible, text.split("\n")))


def _escaped(char: str) -> str:
    # A blank that does not break is what reports hold cells together with.
    return (
        char if char.isprintable() or char == "\N{NO-BREAK SPACE}" else char.encode("unicode_escape").decode()
    )


def _cut(text: str, most: int) -> str:
    """The beginning and the end, which say most."""
    if len(text) <= most:
        return text
    tail = (most - 3) // 3
    return f"{text[: most - 3 - tail]}...{text[len(text) - tail :]}"
