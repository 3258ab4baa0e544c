"""HTML elements as escaped text. Every page builds its HTML with `tag`.

Invariant: text that is not `Markup` is made legible and escaped before it becomes part of an element.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from zerodrift.legible import lines


class Markup(str):
    """HTML text, which is not escaped again."""


Child = str | Iterable[str]
"""Plain text, markup, or several of them."""

_VOID = frozenset(("input", "meta", "wbr", "rect"))
"""Elements without an end tag: void ones of HTML, and `rect` of SVG."""


def tag(name: str, /, *children: Child, **attributes: str | float | bool) -> Markup:
    """Build an element. `class_` and `aria_label` mean `class` and `aria-label`. False omits an attribute."""
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
    """Concatenate children, with plain text escaped."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(html.escape(lines(child), quote=False))
        else:
            parts.append(join(child))
    return Markup("".join(parts))
