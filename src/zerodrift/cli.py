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
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from zerodrift import __version__
from zerodrift.errors import ConfigError, Problems, ZerodriftError

if TYPE_CHECKING:
    from zerodrift.plan.table import Plan
    from zerodrift.plan.timeline import Timeline

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
    """Show which modes, accumulate dtypes, states, stages, pipelines and backends go together.

    \b
    Examples:
      zerodrift support
      zerodrift support --markdown > docs/support.md
    """
    with _errors(debug):
        from zerodrift.policy.support import states, table
        from zerodrift.report import as_json
        from zerodrift.report.support import support_markdown, support_text

        if markdown and json:
            raise typer.BadParameter("give --markdown or --json, not both")
        if json:
            _emit(as_json.support_json(table(), states()))
        else:
            made = table(), states()
            _emit(support_markdown(*made) if markdown else support_text(*made, color=_color()))


@app.command(short_help="What is in a checkpoint, and whether it is complete.")
def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of checkpoints.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every file with its checksum, not only its size.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what is in a checkpoint: step, plan, tensors, sizes, and whether it is complete.

    Exit code 2 if one is not.

    \b
    Examples:
      zerodrift inspect runs/a
      zerodrift inspect runs/a/step-00000200 --verify
    """
    with _errors(debug):
        from zerodrift.io import inspect as looking

        with _progress(f"reading {checkpoint}"):
            found = looking.inspect(checkpoint, verify=verify)
        text = looking.inspection_json(found) if json else looking.inspection_text(found, color=_color())
        _emit(text)
        if not found.complete:
            raise typer.Exit(USAGE)


@app.command(short_help="A checkpoint to safetensors and back, or out of DeepSpeed.")
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A checkpoint, DeepSpeed's too, or safetensors files.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to write.")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="KIND",
            help="safetensors or checkpoint; left out, ours becomes safetensors, the rest a checkpoint.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="X", help="Folder or file with the weights' transformers config."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="D", help="fp32, bf16 or fp16, for safetensors.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Of one safetensors file.")
    ] = "5GB",
    tag: Annotated[str, typer.Option("--tag", metavar="TAG", help="Which one; the latest if left out.")] = "",
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="KIND", help="Of DeepSpeed's moments, if not AdamW.")
    ] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the code that pickles of DeepSpeed name. For your own files.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Convert weights, and masters, moments and counters where both sides have them.

    What SOURCE is, is found out and printed. One process does it, a few megabytes at a time. With --model,
    safetensors get the names, layout and config that transformers loads; without it, the module's own names.

    \b
    Examples:
      zerodrift convert runs/a exported --model path/to/model --dtype bf16
      zerodrift convert ds_run converted              (DeepSpeed ZeRO 0-3, to go on training)
      zerodrift convert ds_run exported --to safetensors --model path/to/model
      zerodrift convert path/to/model start --to checkpoint
    """
    with _errors(debug):
        if to not in (None, "safetensors", "checkpoint"):
            raise ConfigError(f"`--to`: must be safetensors or checkpoint; got {to!r}.")
        from zerodrift.io.convert import Asked
        from zerodrift.io.convert import convert as run

        kind: Literal["safetensors", "checkpoint"] | None = None
        if to is not None:
            kind = "checkpoint" if to == "checkpoint" else "safetensors"
        asked = Asked(kind, dtype, max_shard_size, overwrite, tag, trust, optimizer)
        _emit(str(run(source, target, asked, model, shown=True)))


@app.command(short_help="Train what a job file says.")
def train(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job file, YAML or JSON; see docs/job.md.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key: run.steps=100. Repeatable."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", min=1, help="Processes on this machine; one per GPU, else one."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train: data, model, plan, steps, checkpoints, a report, and the model at the end.

    Goes on from the newest checkpoint of the run's folder, if there is one. Under torchrun or srun it joins
    the ranks that were started. Ctrl-C finishes the step and saves; a second one ends it at once.

    \b
    Examples:
      zerodrift train examples/pretrain.yaml
      zerodrift train job.yaml --set run.steps=100 --set config.zero_optimization.stage=2 --nproc 2
      torchrun --nproc-per-node=8 -m zerodrift train job.yaml
    """
    with _errors(debug):
        from zerodrift.train.here import train as run

        code = run(job, tuple(set_ or ()), nproc, debug)
    if code:
        raise typer.Exit(code)


@app.command(short_help="Text from a trained model.")
def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What the text begins with.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="At most so many.")] = 200,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="T", min=0.0, help="0 takes the likeliest token.")
    ] = 0.8,
    top: Annotated[
        int, typer.Option("--top", metavar="K", min=0, help="Of the K likeliest tokens; 0 is of all.")
    ] = 40,
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Of the choice.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is what a user says in a conversation.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Let a trained model go on from a prompt, to see that it learned.

    Reads the run's export, or its newest checkpoint where it has not ended.

    \b
    Examples:
      zerodrift sample runs/demo --prompt 'def '
      zerodrift sample runs/chat --chat --prompt 'Who are you?' --temperature 0
    """
    with _errors(debug):
        from zerodrift.train.sample import Sampler, Taste

        with _progress(f"reading {run}"):
            sampler = Sampler(run)
        _emit(prompt if not chat else "")
        for text in sampler.continued(prompt, Taste(tokens, temperature, top, seed), chat):
            _emit(text)
        _emit("\n")


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

    bill, timeline = cost(made, micro_batches), _timeline(made)
    if html is not None:
        from zerodrift.report.page import plan_page

        _write(html, plan_page(made, bill, grouped(made), timeline))
    if rows is None:
        if json:
            return as_json.plan_json(made, bill, timeline)
        return terminal.plan_text(made, bill, grouped(made), timeline, color=_color())
    chosen = names.matching(made, rows, "--rows")
    if json:
        return as_json.rows_json((explain_row(made, index) for index in chosen), made)
    return terminal.rows_text(made, single(made, chosen), color=_color())


def _timeline(made: Plan) -> Timeline | None:
    """The order of a pipeline, which is torch's to say; None without a pipeline."""
    if made.policy.pipeline is None:
        return None
    from zerodrift.pipeline.schedules import timeline

    return timeline(made)


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
