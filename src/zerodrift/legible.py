"""Escape and cut foreign text before it is printed.

Names of parameters, classes, files and config keys come from other people. Error messages, reports and pages
make them legible. JSON stays exact, because it has its own escapes.

Invariant: the result is one line of printable characters of bounded length. A legible text is not changed.
"""

from __future__ import annotations

import re

WORD = 240
"""Most characters of a word without blanks, such as a path."""

LINE = 8_000
"""Most characters of a line."""

_LONG = re.compile(rf"\S{{{WORD + 1},}}")

_PLAIN = str.maketrans({"─": "-", "█": "#"})
"""Replacements of drawing characters for terminals without them."""


def legible(text: str) -> str:
    """Return a text on one line. Unprintable characters are escaped, and the middle of long words is cut."""
    if len(text) > 4 * LINE:
        text = _cut(text, 2 * LINE)
    if not text.isprintable():
        text = "".join(map(_escaped, text))
    if len(text) > WORD:
        text = _LONG.sub(lambda match: _cut(match[0], WORD), text)
    return _cut(text, LINE)


def encodable(text: str, encoding: str | None) -> str:
    """Replace the characters of a text that an encoding cannot represent."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text


def lines(text: str) -> str:
    """Make every line of a text legible."""
    return "\n".join(map(legible, text.split("\n")))


def _escaped(char: str) -> str:
    # Reports use no-break spaces.
    return (
        char if char.isprintable() or char == "\N{NO-BREAK SPACE}" else char.encode("unicode_escape").decode()
    )


def _cut(text: str, most: int) -> str:
    """Keep the beginning and the end of a long text."""
    if len(text) <= most:
        return text
    tail = (most - 3) // 3
    return f"{text[: most - 3 - tail]}...{text[len(text) - tail :]}"
