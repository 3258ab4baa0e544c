"""What the benchmarks import from the package is there: they are run by hand, and seldom."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[2] / "bench").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_names_of_the_package_are_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("zerodrift"):
            continue
        module = importlib.import_module(node.module or "")
        missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
        assert not missing, (node.module, missing)
