"""The command line's surface: a frozen list of verbs and options, exit codes, speed of `--help`."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from zerodrift import __version__, cli
from zerodrift.__main__ import main as console_script
from zerodrift.cli import plan as planning
from zerodrift.cli import streams
from zerodrift.errors import ConfigError, UnsupportedError

ROOT = Path(__file__).parents[2]

SURFACE_TEXT = {
    "": "--help, --install-completion, --show-completion, --version",
    "data": "--debug, --help, --set, JOB",
    "plan": (
        "--auto, --debug, --device, --help, --html, --inputs, --json, --micro-batches, --model, --recompute, "
        "--rows, --set, --simulate, --sweep, --tokens, --trace, --world-size, CONFIG"
    ),
    "explain": "--auto, --debug, --help, --json, --model, --set, --world-size, CONFIG, PARAM",
    "convert": (
        "--debug, --dtype, --help, --max-shard-size, --merge, --model, --optimizer, --overwrite, "
        "--tag, --to, --trust, SOURCE, TARGET"
    ),
    "audit": (
        "--batches, --budget, --confirm, --data, --debug, --help, --html, --json, --model, --narrow, "
        "--of, --set, --weights, JOB_OR_CONFIG"
    ),
    "check": (
        "-- COMMAND..., --debug, --expect, --help, --html, --json, --keep-going, --save, --steps, --timeout"
    ),
    "diff": "--debug, --help, A, B",
    "doctor": "--debug, --help, --json",
    "drift": (
        "--auto, --bar, --debug, --help, --json, --loaded, --model, --recorded, --sampler, --sent, "
        "--set, --tokens, --weights, CONFIG"
    ),
    "examples": "--copy, --debug, --help, [FOLDER]",
    "help": "--debug, --help, [NAME]",
    "inspect": "--debug, --help, --json, --verify, CHECKPOINT",
    "replay": "--debug, --from, --help, --nproc, --to, RUN",
    "run": "-- COMMAND..., --as, --config, --debug, --help, --pin, --plan, --quiet, --set",
    "sample": "--chat, --debug, --help, --prompt, --seed, --temperature, --tokens, --top, RUN",
    "support": "--debug, --help, --json, --markdown",
    "evaluate": "--debug, --help, --nproc, --set, JOB",
    "train": "--debug, --dry-run, --help, --nproc, --plan, --set, JOB",
}
SURFACE = {verb: text.split(", ") for verb, text in SURFACE_TEXT.items()}
"""Verb -> its options and arguments. A new one is a decision: add it here and to the docs."""

HEAVY = ("torch", "transformers", "numpy", "yaml", "zerodrift.config.schema", "zerodrift.plan")
"""Modules that no help text may import. Typer itself may import pydantic to describe options."""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerodrift", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, check=False
    )


def surface() -> Iterator[tuple[str, list[str]]]:
    group = get_command(cli.app)
    for name, command in [("", group), *group.commands.items()]:  # type: ignore[attr-defined]
        context = command.make_context("zerodrift", [], resilient_parsing=True)
        found = []
        for parameter in command.get_params(context):
            long = [text for text in parameter.opts if text.startswith("--")]
            found.append(long[0] if long else parameter.metavar or parameter.name)
        yield name, sorted(found)


def test_the_surface_is_what_was_decided() -> None:
    assert dict(surface()) == SURFACE


# --- help -------------------------------------------------------------------------------------------


def test_help_takes_less_than_half_a_second() -> None:
    """Processor time counts, which a busy machine does not change much; on an idle one it is the clock's."""
    took = []
    for _ in range(3):
        before = _processor_time_of_children()
        assert run("--help").returncode == 0
        took.append(_processor_time_of_children() - before)
    assert min(took) < 0.5


def _processor_time_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


EACH_HELP = """
import sys
from zerodrift.cli import main

for verb in sys.argv[1:]:
    sys.argv = ["zerodrift", *filter(None, [verb]), "--help"]
    print("\\f", end="", flush=True)
    try:
        main()
    except SystemExit as stop:
        assert stop.code in (0, None), (verb, stop.code)
    loaded = [name for name in {heavy} if name in sys.modules and (verb or name != "pydantic")]
    assert not loaded, (verb, loaded)
"""


@pytest.mark.parametrize("width", [60, 80])
def test_help_fits_the_screen_and_imports_nothing_heavy(width: int) -> None:
    """All verbs run in one process; the group itself, which imports less, runs first."""
    command = [sys.executable, "-c", EACH_HELP.format(heavy=HEAVY), *SURFACE]
    environment = {**os.environ, "COLUMNS": str(width)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    before, *texts = done.stdout.split("\f")
    assert before == "" and len(texts) == len(SURFACE) and all("Usage: zerodrift" in text for text in texts)
    lines = {verb: text.splitlines() for verb, text in zip(SURFACE, texts, strict=True)}
    assert [line for each in lines.values() for line in each if len(line) > width] == []
    if width == 80:
        assert {verb: len(each) for verb, each in lines.items() if len(each) > 40} == {}
    assert re.findall(r"<(?:str|path|list)|\[\[|\}\.\.\.", done.stdout) == []


@pytest.mark.parametrize("verb", sorted(SURFACE.keys() - {""}))
def test_help_of_a_verb_has_examples_that_it_takes(verb: str) -> None:
    command = get_command(cli.app).commands[verb]  # type: ignore[attr-defined]
    text = (command.help or "").partition("Example")[2].replace("\\\n", " ")
    given = [
        shlex.split(line, comments=True) for line in re.findall(r"^ *(zerodrift .*)", text, re.MULTILINE)
    ]
    assert given
    for _, name, *arguments in given:
        assert name == verb
        command.make_context(verb, [part for part in arguments if part not in (">", "support.md")])


def test_help_says_what_every_option_does_and_names_files_that_are_there() -> None:
    found = []
    for command in get_command(cli.app).commands.values():  # type: ignore[attr-defined]
        found += re.findall(r"examples/[\w./-]+", command.help or "")
        assert all(parameter.help for parameter in command.params), command.name
    assert found and [path for path in found if not (ROOT / path).exists()] == []


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"zerodrift {__version__}\n")


# --- exit codes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "config.yaml"],
        ["paln"],
        ["plan", "config.yaml", "--model", "x", "--world-size", "0"],
        ["plan", "config.yaml", "--model", "x", "--micro-batches", "none"],
        ["plan", "config.yaml", "--model", "x", "--no-such-option"],
        ["support", "--json", "--markdown"],
        ["explain", "config.yaml", "--model", "x"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2_without_a_traceback(
    arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zerodrift", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err and "Traceback" not in said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["paln"], "No such command: 'paln'. Did you mean `plan`?"),
        (["export"], "`zerodrift convert` writes the weights"),
        (["eval"], "Did you mean `evaluate`?"),
        (["frobnicate"], "`zerodrift --help` lists all."),
        (["check", "--step", "3"], "No such option: --step. Did you mean `--steps`?"),
        (["train", "--nprocs", "2"], "No such option: --nprocs. Did you mean `--nproc`?"),
        (["check", "--quick", "x"], "No such option: --quick.\n"),
        (["--verion"], "No such option: --verion. Did you mean `--version`?"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_the_nearest_command_or_option_is_suggested(
    arguments: Sequence[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zerodrift", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert said in capsys.readouterr().err


def test_what_other_tools_call_a_command_names_none_of_ours() -> None:
    group = get_command(cli.app)
    assert not cli.OTHER_NAMES.keys() & group.commands.keys()  # type: ignore[attr-defined]
    for text in cli.OTHER_NAMES.values():
        for name in re.findall(r"`(?:zerodrift )?([a-z]+)[ `]", text):
            assert name in group.commands, text  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", ["check", "run"])
def test_a_command_may_stand_without_dashes_before_it(verb: str) -> None:
    command = get_command(cli.app).commands[verb]  # type: ignore[attr-defined]
    words = ["torchrun", "--nproc-per-node", "2", "train.py", "--debug"]
    for before in ([], ["--"]):
        context = command.make_context(verb, ["--debug", *before, *words])
        assert context.params["command"] == words and context.params["debug"]


def test_help_lists_commands_and_prints_their_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for arguments in (["help", "plan"], ["plan", "-h"], ["help"]):
        monkeypatch.setattr(sys, "argv", ["zerodrift", *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert re.search(r"^plan +Show every dtype", texts[2], re.MULTILINE)


def test_a_refusal_is_a_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, streams.errors(debug=False):
        raise UnsupportedError("backend", "must be native here")
    assert caught.value.exit_code == 2
    out = capsys.readouterr()
    assert (out.out, out.err) == (
        "",
        "zerodrift: error: `backend`: must be native here.\nTo read about it: zerodrift help unsupported\n",
    )


def test_debug_shows_the_traceback_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), streams.errors(debug=True):
        raise UnsupportedError("backend", "must be another")
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "\nzerodrift: error: `backend`: must be another.\n" in err


def test_our_own_mistakes_are_not_hidden() -> None:
    with pytest.raises(AssertionError), streams.errors(debug=False):
        raise AssertionError("a broken promise")


# --- streams ----------------------------------------------------------------------------------------


class Screen:
    """A stream with a given answer to `isatty`."""

    encoding = "utf-8"

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "environment", "colored"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
        (False, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_is_for_terminals(
    terminal: bool, environment: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Screen(terminal))
    assert streams.color() is colored


def test_piped_output_is_100_columns_without_colour_in_the_characters_of_its_stream() -> None:
    done = run("support", FORCE_COLOR="1", COLUMNS="", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert done.stdout.isascii() and 90 < max(map(len, lines)) <= 100


@pytest.mark.parametrize("width", [60, 80])
def test_columns_of_the_environment_are_the_width_of_piped_output(width: int) -> None:
    for arguments in ([], ["examples"], ["help"], ["help", "command"]):
        lines = run(*arguments, COLUMNS=str(width)).stdout.splitlines()
        assert lines and max(map(len, lines)) <= width, arguments
    command = [sys.executable, "-c", "from zerodrift.report import report_width as w; print(w())"]
    for columns, found in ((str(width), width), ("9", 50), ("900", 120), ("x", 100)):
        environment = {**os.environ, "COLUMNS": columns}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert int(done.stdout) == found


def test_auto_is_a_number_per_key() -> None:
    given = ["train_batch_size=256", "optimizer.params.lr=1e-4"]
    assert planning.numbers(given) == {"train_batch_size": 256.0, "optimizer.params.lr": 1e-4}
    for text in ("a", "=1", "a=b"):
        with pytest.raises(ConfigError, match="--auto"):
            planning.numbers(["a=1", text])


def test_ctrl_c_before_a_verb_has_begun_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zerodrift.cli.main", interrupted)
    with pytest.raises(SystemExit) as stopped:
        console_script()
    assert stopped.value.code == streams.INTERRUPTED
