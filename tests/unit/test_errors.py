"""Errors are made of four parts, keep them, and read the same everywhere."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from zerodrift.errors import ConfigError, MeshError, Problem, Problems, RankError, ZerodriftError


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


def test_one_text_is_no_error_of_ours() -> None:
    for arguments in (("`a`: must be b.",), ("a", "must be b", "c"), ()):
        with pytest.raises(TypeError):
            ConfigError(*arguments)  # type: ignore[arg-type]


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


def test_errors_are_joined_with_all_that_they_say() -> None:
    both = ConfigError.joined([ConfigError("a", "must be b"), RankError.relayed("rank 1: it fell")])
    assert type(both) is ConfigError and str(both) == "`a`: must be b.\nrank 1: it fell"
    assert both.problems == (Problem("a", "must be b"),)


def test_what_is_relayed_has_a_text_and_no_parts() -> None:
    error = RankError.relayed("rank 1: `a`: must be b; got c.")
    assert str(error) == "rank 1: `a`: must be b; got c."
    assert (error.where, error.must, error.got, error.do, error.problems) == ("", "", "", "", ())


def test_an_error_keeps_its_notes_between_processes() -> None:
    error = ZerodriftError("a", "must be b")
    error.__dict__["__notes__"] = ["told by rank 1"]  # what BaseException.add_note does, from Python 3.11 on
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["told by rank 1"]
