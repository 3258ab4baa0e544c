"""The command line: thin verbs over the library. What a verb prints, `report` has written.

Only the product goes to stdout, so `--json` can be piped; messages and the progress line go to stderr.
Rooms are imported inside the verbs, so that `--help` is instant and needs neither torch nor pydantic.

Invariant: what zerodrift refuses ends as one message and exit code 2, never as a traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerodrift import __version__
from zerodrift.errors import ConfigError, Problems, ZerodriftError

if TYPE_CHECKING:
    from zerodrift.plan.table import Plan

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
"""Exit codes; the last two are those of a shell for SIGINT and SIGPIPE."""

app = typer.Typer(
    name="zerodrift",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="Config file, YAML or JSON; a DeepSpeed config will do.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="X",
        help="A folder or file with a transformers config or safetensors, or package.module:function.",
    ),
]
WorldSize = Annotated[int, typer.Option("--world-size", metavar="N", min=1, help="Ranks to plan for.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a config key: zero_optimization.stage=2. Repeatable."
    ),
]
Auto = Annotated[
    list[str] | None,
    typer.Option(
        "--auto",
        metavar="KEY=NUMBER[,NUMBER]",
        help='What a numeric "auto" of the config stands for. Repeatable.',
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> None:
    """The console script."""
    app(prog_name="zerodrift")


def _version(wanted: bool) -> None:
    if wanted:
        _emit(f"zerodrift {__version__}\n")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Sharded mixed-precision training in which every dtype is decided in one readable table.

    \b
    Start here:
      zerodrift plan config.yaml --model path/to/model --world-size 8
    """


@app.command(short_help="Every dtype of every parameter, why, and what it costs.")
def plan(
    config: Config,
    model: Model,
    world_size: WorldSize = 1,
    micro_batches: Annotated[
        int | None, typer.Option(metavar="M", min=1, help="Micro-batches per step to count the cost for.")
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only parameters that match the glob, one by one.")
    ] = None,
    set_: Set = None,
    auto: Auto = None,
    json: Json = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the plan as one self-contained HTML page.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show what will happen: every dtype of every parameter, why, and what it costs.

    Nothing is started and no weights are read, so a laptop can plan for thousands of ranks.

    \b
    Examples:
      zerodrift plan ds_config.json --model path/to/model --world-size 64
      zerodrift plan config.yaml --model path/to/model --rows '*.router.*'
      zerodrift plan config.yaml --model path/to/model --set precision.mode=bf16 --html plan.html

    --rows narrows what is printed, as text or JSON; the HTML page always holds the whole plan.
    """
    with _errors(debug):
        with _progress(f"planning {model}"):
            made = _plan(config, model, world_size, set_, auto)
            text = _plan_text(made, micro_batches, rows, json, html)
        _emit(text)


@app.command(short_help="One parameter: its dtypes, their reasons, its slices.")
def explain(
    config: Config,
    model: Model,
    parameter: Annotated[str, typer.Argument(metavar="PARAM", help="Full name of a parameter.")],
    world_size: WorldSize = 1,
    set_: Set = None,
    auto: Auto = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show one parameter: each of its dtypes, what set it, and which rank owns what.

    \b
    Example:
      zerodrift explain config.yaml --model path/to/model model.layers.3.mlp.router.weight
    """
    with _errors(debug):
        from zerodrift.report import as_json, terminal
        from zerodrift.report.explain import explain as explained

        with _progress(f"planning {model}"):
            made = _plan(config, model, world_size, set_, auto)
            found = explained(made, parameter)
        if json:
            _emit(as_json.explanation_json(found, made))
        else:
            _emit(terminal.explanation_text(found, made.digest, color=_color()))


@app.command(short_help="Which combinations run, and why the others do not.")
def support(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown page.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show which modes, accumulate dtypes, stages, pipelines and backends go together.

    \b
    Examples:
      zerodrift support
      zerodrift support --markdown > docs/support.md
    """
    with _errors(debug):
        from zerodrift.policy.support import table
        from zerodrift.report import as_json
        from zerodrift.report.support import support_markdown, support_text

        if markdown and json:
            raise typer.BadParameter("give --markdown or --json, not both")
        if json:
            _emit(as_json.support_json(table()))
        else:
            _emit(support_markdown(table()) if markdown else support_text(table(), color=_color()))


# --- work of the verbs --------------------------------------------------------------------------------


def _plan(
    config: str, model: str, world_size: int, overrides: Sequence[str] | None, auto: Sequence[str] | None
) -> Plan:
    from zerodrift.api import make_plan

    return make_plan(config, model, world_size, auto=_numbers(auto or ()), overrides=tuple(overrides or ()))


def _plan_text(made: Plan, micro_batches: int | None, rows: str | None, json: bool, html: Path | None) -> str:
    """What `plan` prints. The page is written first: if it cannot be, nothing else is said."""
    from zerodrift.plan.cost import cost
    from zerodrift.report import as_json, names, terminal
    from zerodrift.report.explain import explain_row
    from zerodrift.report.rows import grouped, single

    bill = cost(made, micro_batches)
    if html is not None:
        from zerodrift.report.page import plan_page

        _write(html, plan_page(made, bill, grouped(made)))
    if rows is None:
        if json:
            return as_json.plan_json(made, bill)
        return terminal.plan_text(made, bill, grouped(made), color=_color())
    chosen = names.matching(made, rows, "--rows")
    if json:
        return as_json.rows_json((explain_row(made, index) for index in chosen), made)
    return terminal.rows_text(made, single(made, chosen), color=_color())


def _numbers(texts: Sequence[str]) -> dict[str, float | list[float]]:
    """`--auto` texts as numbers, or pairs of them (`betas=0.9,0.95`); all that are wrong at once."""
    problems = Problems()
    found: dict[str, float | list[float]] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        try:
            numbers = [float(part) for part in value.split(",")]
            found[key.strip()] = numbers[0] if len(numbers) == 1 else numbers
        except ValueError:
            separator = ""
        if not separator or not key.strip():
            problems.add("--auto", "must be KEY=NUMBER", repr(text), "For example train_batch_size=256.")
    problems.raise_as(ConfigError)
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ZerodriftError(
            f"`--html`: must be a file that can be written; got {str(path)!r}: {reason}."
        ) from None
    print(f"zerodrift: wrote {path}", file=sys.stderr)


# --- streams ------------------------------------------------------------------------------------------


@contextmanager
def _errors(debug: bool) -> Iterator[None]:
    """Refusals as a message on stderr and an exit code."""
    try:
        yield
    except ZerodriftError as error:
        if debug:
            traceback.print_exc()
        print(f"zerodrift: error: {error}", file=sys.stderr)
        raise typer.Exit(USAGE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _color() -> bool:
    """Colour for a person at a terminal who has not said no (https://no-color.org)."""
    dumb = os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not dumb and not os.environ.get("NO_COLOR")


def _progress(text: str) -> AbstractContextManager[object]:
    """A spinner while a large model is read, where somebody is watching."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


def _emit(text: str) -> None:
    """Print the product. A reader who has gone away, `| head`, is no error."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit; let it have something to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None


_PLAIN = str.maketrans({"─": "-", "█": "#"})
"""For terminals that cannot show the drawing characters."""
