"""HTML elements as escaped text: the one place where a page's markup is formed.

`page` and nothing else writes HTML, and it writes it through `tag`, so a model's names can hold any
character.

Invariant: text that is not `Markup` is made legible and escaped before it becomes part of an element.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from zerodrift.legible import lines


class Markup(str):
    """Text that is already HTML."""


Child = str | Iterable[str]
"""Plain text, markup, or several of them."""

_VOID = frozenset(("input", "meta", "wbr", "rect"))
"""Elements written without an end: HTML's void ones, and the leaf of our drawings."""


def tag(name: str, /, *children: Child, **attributes: str | float | bool) -> Markup:
    """An element. `class_` and `aria_label` spell `class` and `aria-label`; False leaves one out."""
    head = name
    for key, value in attributes.items():
        if value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        head += f" {key}" if value is True else f' {key}="{html.escape(lines(str(value)))}"'
    if name in _VOID:
        return Markup(f"<{head}/>" if name == "rect" else f"<{head}>")
    return Markup(f"<{head}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Children one after the other, plain text escaped."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(html.escape(lines(child), quote=False))
        else:
            parts.append(join(child))
    return Markup("".join(parts))
