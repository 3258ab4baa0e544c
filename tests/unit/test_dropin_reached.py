"""Every name of DeepSpeed's that frameworks reach for in their source is here, or says what to use."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FRAMEWORKS = ("accelerate", "transformers", "lightning", "peft", "trl")

THEIRS = {
    "deepspeed.utils.is_initialized",  # of transformers' ESMFold, for a DeepSpeed of 2022
    "deepspeed.dtypes",
}
"""What DeepSpeed 0.19.6 has not either."""


def reached(tree: ast.AST) -> Iterator[str]:
    """Dotted names under `deepspeed`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").startswith("deepspeed")
        ):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("deepspeed."))
        elif isinstance(node, ast.Attribute):
            found = ast.unparse(node)
            if found.startswith("deepspeed.") and found.replace(".", "").isidentifier():
                yield found


def there(name: str) -> bool:
    """Whether the drop-in has it, as an attribute or as a module."""
    at: Any = importlib.import_module("zerodrift.deepspeed")
    path = "zerodrift.deepspeed"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            at = getattr(at, part)
        except AttributeError:
            if not hasattr(at, "__path__") or importlib.util.find_spec(path) is None:
                return False
            at = importlib.import_module(path)
        if isinstance(at, type):
            return True
    return True


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_framework_reaches_for_is_there(framework: str) -> None:
    spec = importlib.util.find_spec(framework)
    if spec is None or spec.origin is None:
        pytest.skip(f"{framework} is not installed")
    names: set[str] = set()
    for path in Path(spec.origin).parent.rglob("*.py"):
        text = path.read_text(errors="replace")
        if "deepspeed" in text and "test" not in path.parts:
            names |= set(reached(ast.parse(text)))
    own = {name for name in names if not name.startswith("deepspeed.transformers")} - THEIRS
    assert own, "it reaches for nothing, and this test sees nothing"
    assert sorted(name for name in own if not there(name)) == []


def test_a_name_that_is_nowhere_is_seen() -> None:
    text = "import deepspeed.nowhere\nfrom deepspeed.zero import Init, Unit\ndeepspeed.comm.get_rank()"
    missing = {name for name in reached(ast.parse(text)) if not there(name)}
    assert missing == {"deepspeed.nowhere", "deepspeed.zero.Unit"}
