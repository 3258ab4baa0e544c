"""Errors are made of their parts, *where: must; got; do*, and not of a hand-shaped text.

The constructor requires the parts, and mypy checks it. This test checks the rest: a part that contains
another, a text of that shape that is no `Problem`, and modules that relay texts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

import pytest

from tests.unit.test_house import trees
from zerodrift import errors
from zerodrift.deepspeed.modules import (
    MissingCheckpointError,
    MisuseError,
    NotHereError,
    RefusedConfigError,
)
from zerodrift.errors import Problem, ZerodriftError

RELAYING = {"comm.shared_errors", "comm.watch", "train.loop.launcher"}
"""Modules that raise the texts of other ranks or processes."""

DROP_INS = (MisuseError, NotHereError, RefusedConfigError, MissingCheckpointError)

OURS = {Problem.__name__, *(kind.__name__ for kind in DROP_INS)} | {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, ZerodriftError)
}

HAND_SHAPED = re.compile(r";\s(it\s)?(got|took)\b|`: (must|is|cannot|its)\b")


def shapeless(module: str, tree: ast.AST) -> Iterator[str]:
    """Yield module, line and the problem."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            yield from (f"{where}: {wrong}" for wrong in call(module, node))
        if id(node) not in prose and HAND_SHAPED.search(text(node) or ""):
            yield f"{where}: a hand-shaped text: {text(node)!r}"


def call(module: str, node: ast.Call) -> Iterator[str]:
    kind = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if kind == "relayed" and module not in RELAYING:
        yield "relays a text, and is not one of those that do"
    if kind not in OURS and not (kind == "add" and "problems" in ast.unparse(node.func)):
        return
    parts = dict(zip(("where", "must", "got", "do"), map(text, node.args), strict=False))
    parts |= {word.arg or "**": text(word.value) for word in node.keywords}
    if not {"where", "must"} <= parts.keys():
        yield f"{kind} of less than two parts"
    must, do = parts.get("must"), parts.get("do")
    if must is not None and (not re.search(r"\b(must|may)\b", must) or must.endswith(".")):
        yield f"says not as a clause what must hold: {must!r}"
    if do is not None and not do.endswith((".", "?", "\0")):
        yield f"says in no sentence what to do: {do!r}"


def text(node: ast.AST) -> str | None:
    """Return the text of a literal, with a NUL for each value, or None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
    return None


def wrong_errors(sources: Mapping[str, ast.AST]) -> list[str]:
    return [
        wrong for module, tree in sources.items() if module != "errors" for wrong in shapeless(module, tree)
    ]


def test_every_error_of_ours_has_its_shape() -> None:
    assert wrong_errors(trees()) == []


def test_every_class_of_ours_is_known_here() -> None:
    ours, ahead = set(), [ZerodriftError]
    while ahead:
        ours.add(ahead[-1].__name__)
        ahead += ahead.pop().__subclasses__()
    assert {name for name in ours if not name.startswith("_")} <= OURS


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("raise ConfigError('`a`: must be b; got c. Do d.')", "less than two parts"),
        ("raise ConfigError(f'`{a}`: must be b.', 'must be so')", "hand-shaped"),
        ("raise ConfigError('a', f'must be b; got {c}')", "hand-shaped"),
        ("raise ConfigError('a', 'is not b')", "not as a clause"),
        ("raise errors.ConfigError('a', 'must be b.')", "not as a clause"),
        ("problems.add('a', 'must be b', got=c, do='pip install d')", "no sentence"),
        ("text = f'`{a}`: must be {b}; got {c}.'", "hand-shaped"),
        ("raise RankError.relayed('`a`: is wrong')", "relays"),
        ("raise ConfigError('a', 'must be b', got=c, do=f'Write {d}.')", ""),
        ("def f():\n    '''Says `a`: must be b; got c.'''", ""),
    ],
)
def test_a_planted_text_is_seen(source: str, wrong: str) -> None:
    seen = wrong_errors({"planted": ast.parse(source)})
    assert bool(seen) == bool(wrong) and all(wrong in told for told in seen[:1]), seen
