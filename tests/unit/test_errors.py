"""Errors are made of four parts, *where: must; got; do*, keep them, and read the same everywhere.

The constructor requires the parts, and mypy checks it. The second half checks the rest: a part that contains
another, a text of that shape that is no `Problem`, and modules that relay texts.
"""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.unit.at_random import ODD_NAMES
from tests.unit.sources import PATHS, module_of, nodes
from zerodrift import errors
from zerodrift.cli import streams
from zerodrift.deepspeed.modules import (
    MissingCheckpointError,
    MisuseError,
    NotHereError,
    RefusedConfigError,
)
from zerodrift.errors import ConfigError, MeshError, Problem, Problems, RankError, ZerodriftError
from zerodrift.legible import LINE, WORD, legible
from zerodrift.report import terminal
from zerodrift.report.frame import elide


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "`run.nproc`: must be 1."),
        ({"got": 0}, "`run.nproc`: must be 1; got 0."),
        ({"do": "Leave it out."}, "`run.nproc`: must be 1. Leave it out."),
        ({"got": "'a'", "do": "Leave it out."}, "`run.nproc`: must be 1; got 'a'. Leave it out."),
        ({"got": "what?"}, "`run.nproc`: must be 1; got what?"),
    ],
)
def test_an_error_is_made_of_its_parts_and_keeps_them(parts: dict[str, str], text: str) -> None:
    made = ConfigError("run.nproc", "must be 1", **parts)  # type: ignore[arg-type]
    for error in (made, pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert type(error) is ConfigError and str(error) == text and error.args == (text,)
        assert (error.where, error.must) == ("run.nproc", "must be 1")
        assert (error.got, error.do) == (str(parts.get("got", "")), parts.get("do", ""))


def test_where_may_be_a_path_and_may_have_backticks_of_its_own() -> None:
    assert str(ConfigError(Path("a/b.yaml"), "must be there")) == "`a/b.yaml`: must be there."
    assert str(ConfigError("`f` on axis `g`", "must be there")) == "`f` on axis `g`: must be there."


def test_several_problems_are_one_error_that_has_them_all() -> None:
    problems = Problems()
    problems.add("a", "must be b", got="c")
    problems.add("a", "must be b", got="c")
    problems.include(Problem("d", "must be e", do="Leave it out."))
    with pytest.raises(MeshError) as caught:
        problems.raise_as(MeshError, "x.yaml")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert str(error) == (
            "x.yaml: 2 problems\n  1. `a`: must be b; got c.\n  2. `d`: must be e. Leave it out."
        )
        assert [problem.where for problem in error.problems] == ["a", "d"] and error.got == "c"


def test_what_is_relayed_or_joined_says_all_and_has_only_the_parts_that_it_was_given() -> None:
    relayed = RankError.relayed("rank 1: `a`: must be b; got c.")
    assert str(relayed) == "rank 1: `a`: must be b; got c."
    assert (relayed.where, relayed.must, relayed.got, relayed.do, relayed.problems) == ("", "", "", "", ())
    both = ConfigError.joined([ConfigError("a", "must be b"), RankError.relayed("rank 1: it fell")])
    assert type(both) is ConfigError and str(both) == "`a`: must be b.\nrank 1: it fell"
    assert both.problems == (Problem("a", "must be b"),)


def test_an_error_keeps_its_notes_between_processes() -> None:
    error = ZerodriftError("a", "must be b")
    error.__dict__["__notes__"] = ["told by rank 1"]  # what BaseException.add_note does, from Python 3.11 on
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["told by rank 1"]


# --- in every source --------------------------------------------------------------------------------------


RELAYING = {"comm.shared_errors", "comm.watch", "train.loop.launcher"}
"""Modules that raise the texts of other ranks or processes."""

DROP_INS = (MisuseError, NotHereError, RefusedConfigError, MissingCheckpointError)

OURS = {Problem.__name__, *(kind.__name__ for kind in DROP_INS)} | {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, ZerodriftError)
}

HAND_SHAPED = re.compile(r";\s(it\s)?(got|took)\b|`: (must|is|cannot|its)\b")


def wrong_errors(module: str, own: Sequence[ast.AST]) -> Iterator[str]:
    """Yield module, line and the problem."""
    prose = {id(node.value) for node in own if isinstance(node, ast.Expr)}
    for node in own:
        if isinstance(node, ast.Call):
            yield from (f"{module}:{node.lineno}: {wrong}" for wrong in call(module, node))
        elif isinstance(node, ast.expr) and id(node) not in prose and HAND_SHAPED.search(text(node) or ""):
            yield f"{module}:{node.lineno}: a hand-shaped text: {text(node)!r}"


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


def test_every_error_of_ours_has_its_shape() -> None:
    others = [path for path in PATHS if module_of(path) != "errors"]
    assert [wrong for path in others for wrong in wrong_errors(module_of(path), nodes(path))] == []


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
    seen = [*wrong_errors("planted", list(ast.walk(ast.parse(source))))]
    assert bool(seen) == bool(wrong) and all(wrong in told for told in seen[:1]), seen


# --- texts of others --------------------------------------------------------------------------------------


ODD = (
    *ODD_NAMES,
    "\x1b]0;your title\x07",
    "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "\x1b[2J\x1b[1;1H",
    "\r\x1b[Kzerodrift: all is well",
    "a\bb\x7f\x85\u2028\u2029\u200b\u2066\ufeff\U000e0001",
    "[link=http://evil]x[/link]",
    "&lt;b&gt; <img src=x onerror=alert(1)> \"'`",
    "\uff37\uff29\uff24\uff25" * 80,
    "wide \u6f22\u5b57 " * 700,
)


def is_legible(text: str) -> None:
    text.encode()
    bad = {char for char in text if not char.isprintable() and char not in "\n\u00a0"}
    assert not bad, sorted(map(ascii, bad))
    assert all(len(line) <= LINE for line in text.split("\n"))


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_a_text_is_one_line_that_nothing_obeys(text: str) -> None:
    told = legible(text)
    is_legible(told)
    for width in (4, 37, 100):
        assert cell_len(elide(text, width)) <= width
        is_legible(elide(text, width))
    assert "\n" not in told and legible(told) == told
    assert max(map(len, told.split())) <= WORD


@pytest.mark.parametrize(
    "text", ["", "model.layers.3.weight", "\u00fc\u6f22 \u00a0x", "a b " * 900, "/a/b" * 50]
)
def test_what_is_legible_is_left_as_it_is(text: str) -> None:
    assert legible(text) == text


ERRORS = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ZerodriftError)
]


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_of_ours_is_legible_however_it_is_made(kind: type[ZerodriftError]) -> None:
    for text in ODD:
        for error in (kind(text, f"must be {text}", got=text, do=text), kind.relayed(text)):
            is_legible(str(error))
            assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert kind.relayed(f"{text}\nsecond line").args[0].split("\n")[-1] == "second line"
        problems = Problems()
        problems.add(text, f"must be {text}", got=text, do=text)
        problems.add("other", "must be")
        with pytest.raises(kind) as caught:
            problems.raise_as(kind, text)
        is_legible(str(caught.value))
        assert str(caught.value).count("\n") == 2


def test_an_error_tells_fifty_problems_and_counts_the_rest() -> None:
    problems = Problems()
    for number in range(1234):
        problems.add(f"key{number}", "must be")
    with pytest.raises(ConfigError) as caught:
        problems.raise_as(ConfigError)
    lines = str(caught.value).split("\n")
    assert lines[0] == "1234 problems" and lines[-1] == "  and 1,184 more" and len(lines) == 52


def test_what_the_command_line_says_beside_the_product(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from zerodrift.cli.plan import write_file

    for number, text in enumerate(ODD):
        with pytest.raises(BaseException, match="2"), streams.errors(False):
            raise ConfigError(text, "must be")
        is_legible(capsys.readouterr().err)
        if "\ud800" in text or "/" in text or "\x00" in text or len(text.encode()) > 200:
            continue
        write_file(tmp_path / f"{number}{text}", "page")
        is_legible(capsys.readouterr().err)


def test_no_report_makes_text_of_somebodys_but_in_one_place() -> None:
    """Only `frame` makes rich's `Text` of anything but our own words."""
    folder = Path(terminal.__file__).parent
    allowed = {"frame.py"}
    for file in folder.glob("*.py"):
        if file.name not in allowed:
            source = file.read_text(encoding="utf-8")
            assert not re.search(r"from_markup|from_ansi|markup=True|\bprint\(", source), file.name
