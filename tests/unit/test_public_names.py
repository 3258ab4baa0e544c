"""`import zerodrift` offers its public names, and imports little."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import zerodrift


def test_public_names_are_listed_and_real() -> None:
    for name in zerodrift.__all__:
        assert getattr(zerodrift, name) is not None
    assert set(zerodrift.__all__) <= set(dir(zerodrift))


def test_public_names_are_exported_for_strict_type_checkers() -> None:
    tree = ast.parse(Path(zerodrift.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    aliases = [alias for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases), "`import X as X` is what makes X public"


def test_a_name_that_is_not_there_says_so() -> None:
    try:
        zerodrift.nothing_like_it  # noqa: B018
    except AttributeError as error:
        assert "nothing_like_it" in str(error)
    else:
        raise AssertionError("an unknown name was found")


def test_importing_and_planning_need_no_torch() -> None:
    code = (
        "import sys, zerodrift\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
        "zerodrift.resolve(zerodrift.load({}), zerodrift.MeshShape())\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
