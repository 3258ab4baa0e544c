"""The package's own sources, each of which is read and parsed once for all tests that look at them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "zerodrift"

PATHS = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(source(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a source, walked once."""
    return tuple(ast.walk(tree(path)))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    """Return the name of a module without the package's; that of the root is empty."""
    return name_of(path).removesuffix("__init__.py").removesuffix(".py").strip("/").replace("/", ".")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string that stands for itself, fields' docstrings among them."""
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
