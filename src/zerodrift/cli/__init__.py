"""The command line: thin verbs over the library. What a verb prints, `report` has written.

The verbs are in `planning`, `checking`, `running`, `auditing`, `drifting`, `files`, `training` and `machine`,
their options in `options`, what `--help` says of them in `texts`, and how they end in `streams`. Rooms are
imported inside the verbs, so that `--help` is instant and needs neither torch nor pydantic.

Invariant: what zerodrift refuses ends as one message and exit code 2, never as a traceback.
"""

from __future__ import annotations

from typing import Annotated

import typer

from zerodrift.cli import (
    auditing,
    checking,
    drifting,
    files,
    machine,
    planning,
    running,
    streams,
    texts,
    training,
)
from zerodrift.versions import __version__

app = typer.Typer(
    name="zerodrift",
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The console script."""
    with streams.printing():
        app(prog_name="zerodrift")


def _version(wanted: bool) -> None:
    if wanted:
        with streams.errors(debug=False):
            streams.emit(f"zerodrift {__version__}\n")
        raise typer.Exit()


@app.callback(help=texts.ROOT)
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What comes before the verb."""


for verb, line, text in (
    (planning.plan, "Show every dtype of every parameter, why, and what a step costs.", texts.PLAN),
    (planning.explain, "Show one parameter: its dtypes, their reasons, its slices.", texts.EXPLAIN),
    (planning.support, "Show which combinations are supported, and why others are not.", texts.SUPPORT),
    (checking.check, "Run a training command, and show which dtypes it has.", texts.CHECK),
    (running.run, "Run a DeepSpeed command, unchanged, on zerodrift.", texts.RUN),
    (checking.diff, "Compare two tables that check saved.", texts.DIFF),
    (auditing.audit, "Measure what every dtype costs, and which pins pay.", texts.AUDIT),
    (drifting.drift, "Compare a trainer with a sampler, and show where drift comes from.", texts.DRIFT),
    (files.inspect, "Show what is in a checkpoint, and whether it is complete.", texts.INSPECT),
    (files.convert, "Convert checkpoints, safetensors and DeepSpeed checkpoints.", texts.CONVERT),
    (training.train, "Train a model as a job file says.", texts.TRAIN),
    (training.evaluate, "Evaluate a checkpoint of a job.", texts.EVALUATE),
    (training.data, "Show what a job is trained on.", texts.DATA),
    (training.replay, "Compute steps of a run again, and find where bits differ.", texts.REPLAY),
    (training.sample, "Continue a prompt with a trained model.", texts.SAMPLE),
    (machine.examples, "List the examples, or copy them.", texts.EXAMPLES),
    (machine.doctor, "Show what this machine has, what is slow on it, and why.", texts.DOCTOR),
):
    app.command(short_help=line, help=text)(verb)
