"""Users' texts are escaped, cut and of their true width in errors, terminals and pages, and exact in JSON."""

from __future__ import annotations

import io
import pickle
import re
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.unit.at_random import ODD_NAMES
from zerodrift import errors
from zerodrift.cli import streams
from zerodrift.errors import ConfigError, Problems, ZerodriftError
from zerodrift.legible import LINE, WORD, legible
from zerodrift.report import terminal
from zerodrift.report.frame import elide

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
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    console = Console(file=io.StringIO(), width=80)
    console.print(streams.progress("planning [red]a[/red]\x1b[7m").renderable)  # type: ignore[attr-defined]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]a[/red]" in shown and "\x1b" not in shown


def test_no_report_makes_text_of_somebodys_but_in_one_place() -> None:
    """Only `frame` makes rich's `Text` of anything but our own words."""
    folder = Path(terminal.__file__).parent
    allowed = {"frame.py"}
    for file in folder.glob("*.py"):
        if file.name not in allowed:
            source = file.read_text(encoding="utf-8")
            assert not re.search(r"from_markup|from_ansi|markup=True|\bprint\(", source), file.name
