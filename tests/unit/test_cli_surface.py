"""The command line's surface: help and its speed, exit codes, suggestions and colour."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.main import get_command

from tests.unit.sources import PATHS, source
from zerodrift import __version__, cli
from zerodrift.cli import streams
from zerodrift.errors import UnsupportedError

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "transformers", "numpy", "yaml", "zerodrift.config.schema", "zerodrift.plan")
"""Modules that no help text may import. Typer itself may import pydantic to describe options."""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerodrift", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, check=False
    )


def options(verb: str, command: Any) -> list[str]:
    """Return the options and arguments of a verb."""
    context = command.make_context(verb, [], resilient_parsing=True)
    found = []
    for parameter in command.get_params(context):
        long = [text for text in parameter.opts if text.startswith("--")]
        found.append(long[0] if long else parameter.metavar or parameter.name)
    return found


GROUP: Any = get_command(cli.app)
SURFACE = {verb: options(verb, command) for verb, command in [("", GROUP), *GROUP.commands.items()]}
"""Verb -> its options and arguments."""


def test_the_version_and_help_take_less_than_half_a_second() -> None:
    """Processor time counts, which a busy machine does not change much; on an idle one it is the clock's."""
    assert run("--version").stdout == f"zerodrift {__version__}\n"
    took = []
    while not took or (min(took) > 0.5 and len(took) < 3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.5


EACH_HELP = """
import os, sys
from zerodrift.cli import main

for width, verb in [(width, verb) for width in (60, 80) for verb in sys.argv[1:]]:
    os.environ["COLUMNS"] = str(width)
    sys.argv = ["zerodrift", *filter(None, [verb]), "--help"]
    print("\\f", end="", flush=True)
    try:
        main()
    except SystemExit as stop:
        assert stop.code in (0, None), (verb, stop.code)
    loaded = [name for name in {heavy} if name in sys.modules and (verb or width > 60 or name != "pydantic")]
    assert not loaded, (verb, loaded)
"""


def test_help_fits_the_screen_and_imports_nothing_heavy() -> None:
    """All verbs run in one process; the group itself, which imports less, runs first."""
    command = [sys.executable, "-c", EACH_HELP.format(heavy=HEAVY), *SURFACE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    before, *texts = done.stdout.split("\f")
    assert before == "" and len(texts) == 2 * len(SURFACE)
    assert all("Usage: zerodrift" in text for text in texts)
    narrow, wide = texts[: len(SURFACE)], texts[len(SURFACE) :]
    for width, shown in ((60, narrow), (80, wide)):
        assert [line for text in shown for line in text.splitlines() if len(line) > width] == []
    assert [text for text in wide if len(text.splitlines()) > 40] == []
    assert re.findall(r"<(?:str|path|list)|\[\[|\}\.\.\.", done.stdout) == []


def test_help_says_what_every_option_does_and_names_files_that_are_there() -> None:
    found = []
    for command in GROUP.commands.values():
        found += re.findall(r"examples/[\w./-]+", command.help or "")
        assert all(parameter.help for parameter in command.params), command.name
    assert found and [path for path in found if not (ROOT / path).exists()] == []


Shown = Callable[..., tuple[int | str | None, str, str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Run a command line in this process; return its exit code, its output and its errors."""

    def run_here(*arguments: str, columns: int = 80) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["zerodrift", *arguments])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return (caught.value.code, *capsys.readouterr())

    return run_here


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan", ""),
        ("support --json --markdown", ""),
        ("paln", "No such command: 'paln'. Did you mean `plan`?"),
        ("export", "`zerodrift convert` writes the weights"),
        ("check --step 3", "No such option: --step. Did you mean `--steps`?"),
        ("check --quick x", "No such option: --quick.\n"),
    ],
)
def test_wrong_usage_exits_2_and_suggests_the_nearest(line: str, said: str, shown: Shown) -> None:
    code, out, err = shown(*line.split())
    assert code == 2 and out == "" and err and said in err and "Traceback" not in err


@pytest.mark.parametrize("verb", ["check", "run"])
def test_a_command_may_stand_without_dashes_before_it(verb: str) -> None:
    command = GROUP.commands[verb]
    words = ["torchrun", "--nproc-per-node", "2", "train.py", "--debug"]
    for before in ([], ["--"]):
        context = command.make_context(verb, ["--debug", *before, *words])
        assert context.params["command"] == words and context.params["debug"]


@pytest.mark.parametrize("debug", [False, True])
def test_a_refusal_is_a_message_and_our_own_mistakes_are_not_hidden(
    debug: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught, streams.errors(debug=debug):
        raise UnsupportedError("backend", "must be native here")
    out, err = capsys.readouterr()
    assert caught.value.exit_code == 2 and out == ""
    message = (
        "zerodrift: error: `backend`: must be native here.\nTo read about it: zerodrift help unsupported\n"
    )
    assert err.endswith(message) and err.startswith("Traceback" if debug else message)
    with pytest.raises(AssertionError), streams.errors(debug=debug):
        raise AssertionError("a broken promise")


@pytest.mark.parametrize(("python", "shell"), streams.IN_A_SHELL)
def test_an_error_names_flags(python: str, shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert any(python.strip("`: ") in source(path) for path in PATHS if path.name != "streams.py")
    with pytest.raises(typer.Exit), streams.errors(debug=False):
        raise UnsupportedError("model", "must", do=f"Or {python}.")
    assert f"Or {shell}." in capsys.readouterr().err


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, variable, colored in (
        *((True, ("NO_COLOR", ""), True), (True, ("NO_COLOR", "1"), False), (True, ("TERM", "dumb"), False)),
        *((False, ("NO_COLOR", ""), False), (False, ("FORCE_COLOR", "1"), False)),
    ):
        with monkeypatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.setenv(*variable)
            patch.setattr(sys, "stdout", SimpleNamespace(isatty=partial(bool, is_terminal), encoding="utf-8"))
            assert streams.color() is colored, variable
