"""The package as a whole: no import cycle of files, no import of the package's root, unique class names.

`test_cited.py` checks the notes and verbs that texts cite.
"""

from __future__ import annotations

import ast
import symtable
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

from tests.unit.sources import PATHS, module_of, source, tree
from tests.unit.test_layers import imports


def trees() -> dict[str, ast.Module]:
    """Return the source of each module, without the package's name; the root is `""`."""
    return {module_of(path): tree(path) for path in PATHS}


def edges(sources: Mapping[str, ast.AST]) -> dict[str, set[str]]:
    """Return the imports of each module; a package counts only for a name of its own."""
    found: dict[str, set[str]] = {module: set() for module in sources}
    for module, parsed in sources.items():
        for name, _ in imports(parsed):
            first, _, rest = name.partition(".")
            while first == "zerodrift" and rest not in sources:
                rest = rest.rpartition(".")[0]
            if first == "zerodrift" and rest != module:
                found[module].add(rest)
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """Return sets of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = set(graph[ahead.pop()]) - seen
            seen |= new
            ahead += new
        return seen

    reach = {module: reached(module) for module in graph}
    inside = [module for module in graph if module in reach[module]]
    return {frozenset(other for other in reach[module] if module in reach[other]) for module in inside}


def twice(sources: Mapping[str, ast.AST]) -> dict[str, list[str]]:
    """Return the modules that define a class of the same name, for each such name."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, parsed in sources.items():
        for node in ast.walk(parsed):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_circle_of_files() -> None:
    """Imports in functions and under TYPE_CHECKING count too. The root imports nearly everything, and
    nothing imports it; `__main__` is run, not imported."""
    graph = edges(trees())
    assert not [module for module, targets in graph.items() if "" in targets and module != "__main__"]
    inside = {module: targets - {""} for module, targets in graph.items() if module}
    assert not [sorted(circle) for circle in circles(inside)]


def test_no_class_has_anothers_name() -> None:
    assert not twice(trees())


def reused(table: symtable.SymbolTable) -> list[str]:
    """Return loop variables of comprehensions that shadow a free variable of their function: Python 3.12
    and 3.13 then take the variable from a `lambda` beside them."""
    found = []
    for inner in table.get_children():
        if table.get_type() == "function" and inner.get_name() in ("listcomp", "setcomp", "dictcomp"):
            outer = set(table.get_frees()) if isinstance(table, symtable.Function) else set()
            names = {symbol.get_name() for symbol in inner.get_symbols() if symbol.is_local()}
            found += [f"{name} in line {inner.get_lineno()}" for name in sorted(names & outer)]
        found += reused(inner)
    return found


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="symtable knows no scope of comprehensions any more")
def test_no_comprehension_takes_the_name_of_what_its_function_closes_over() -> None:
    tables = {path: symtable.symtable(source(path), str(path), "exec") for path in PATHS}
    assert {str(path): names for path, table in tables.items() if (names := reused(table))} == {}
    inner = "        show = lambda: own\n        return show(), [{name} for {name} in pairs]\n"
    text = "def outer(own):\n    def before(pairs):\n" + inner + "    return before\n"
    assert reused(symtable.symtable(text.format(name="own"), "planted", "exec")) == ["own in line 4"]
    assert reused(symtable.symtable(text.format(name="each"), "planted", "exec")) == []


def planted(**sources: str) -> dict[str, ast.AST]:
    return {"": ast.parse(""), **{name: ast.parse(text) for name, text in sources.items()}}


def test_a_circle_is_seen_wherever_its_import_stands() -> None:
    lazy = "def f():\n    from zerodrift.b import g"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zerodrift.a import f"
    sources = planted(a=lazy, b=typed, c="import zerodrift.a")
    assert circles(edges(sources)) == {frozenset({"a", "b"})}
    assert circles(edges(planted(a=lazy, b=""))) == set()


@pytest.mark.parametrize(
    ("text", "target"),
    [("from zerodrift import resolve", ""), ("import zerodrift", ""), ("from zerodrift import b", "b")],
)
def test_an_import_of_the_root_is_seen(text: str, target: str) -> None:
    assert edges(planted(a=text, b=""))["a"] == {target}


def test_a_name_of_two_classes_is_seen() -> None:
    both = planted(a="class One: ...\nclass Two: ...", b="def f():\n    class Two: ...")
    assert twice(both) == {"Two": ["a", "b"]}
