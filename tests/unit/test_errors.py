"""Errors are made of four parts, *where: must; got; do*, keep them, and are legible with any text."""

from __future__ import annotations

import copy
import pickle

import pytest
from rich.cells import cell_len

from tests.unit.at_random import ODD_NAMES
from zerodrift import errors
from zerodrift.cli import streams
from zerodrift.errors import ConfigError, MeshError, Problem, Problems, ZerodriftError
from zerodrift.legible import LINE, WORD, legible
from zerodrift.report.frame import elide


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "`run.nproc`: must be 1."),
        ({"got": 0}, "`run.nproc`: must be 1; got 0."),
        ({"got": "'a'", "do": "Leave it out."}, "`run.nproc`: must be 1; got 'a'. Leave it out."),
    ],
)
def test_an_error_is_made_of_its_parts_and_keeps_them(parts: dict[str, str], text: str) -> None:
    made = ConfigError("run.nproc", "must be 1", **parts)  # type: ignore[arg-type]
    for error in (made, pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert type(error) is ConfigError and str(error) == text and error.args == (text,)
        assert (error.where, error.must) == ("run.nproc", "must be 1")
        assert (error.got, error.do) == (str(parts.get("got", "")), parts.get("do", ""))


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


@pytest.mark.parametrize(
    ("must", "kind"),
    [
        ("must be written inside `engine.gathered(write=True)`", "not-gathered"),
        ("must be written", "config"),
        ("must stay frozen, as planned", "parameter-changed"),
        ("must stay as it is while it is read", "config"),
        ("must be there when the engine is made", "config"),
    ],
)
def test_an_error_leads_to_the_page_about_its_kind(must: str, kind: str) -> None:
    assert ConfigError("a", must).kinds == [kind]


# --- texts of others --------------------------------------------------------------------------------------


ODD = (
    *ODD_NAMES,
    "\x1b]0;your title\x07",
    "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "\r\x1b[Kzerodrift: all is well",
    "a\bb\x7f\x85\u2028\u2029\u200b\u2066\ufeff\U000e0001",
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


def test_what_the_command_line_says_beside_the_product(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ODD:
        with pytest.raises(BaseException, match="2"), streams.errors(False):
            raise ConfigError(text, "must be")
        is_legible(capsys.readouterr().err)
