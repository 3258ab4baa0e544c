"""The package's own sources, each of which is read and parsed once for all tests that look at them."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "src" / "zerodrift"

PATHS = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    return parse(path)


def parse(path: Path) -> ast.Module:
    """Parse a source while the garbage collector, which would look through all trees again, does not."""
    gc.disable()
    try:
        return ast.parse(source(path))
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a source, walked once."""
    return tuple(ast.walk(tree(path)))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    """Return the name of a module without the package's; that of the root is empty."""
    return name_of(path).removesuffix("__init__.py").removesuffix(".py").strip("/").replace("/", ".")


class Outline(NamedTuple):
    """Statements of a source that the rules of words are about."""

    docstrings: tuple[tuple[int, int, str], ...]
    """First line, last line and text of each string that stands for itself, as those of fields do."""
    classes: tuple[str, ...]


@functools.cache
def outline(path: Path) -> Outline:
    docstrings, classes = [], []
    ahead: list[ast.AST] = [parse(path)]
    while ahead:
        match node := ahead.pop():
            case ast.Expr(value=ast.Constant(value=str(text)), lineno=first, end_lineno=int(last)):
                docstrings.append((first, last, text))
            case ast.ClassDef(name=name):
                classes.append(name)
        for block in ("body", "orelse", "handlers", "finalbody", "cases"):
            ahead += getattr(node, block, ())
    return Outline(tuple(docstrings), tuple(classes))
