"""The command line: thin verbs over the library.

Options are in `options`, help texts in `texts`, streams and exit codes in `streams`. The other files hold
the verbs. Verbs import other rooms when they run, so that `--help` is instant and needs no torch.

Invariant: a refusal ends as one message and exit code 2, never as a traceback.
"""

from __future__ import annotations

from typing import Annotated

import typer

from zerodrift.cli import audit, check, checkpoints, machine, plan, run, streams, texts, train
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
    """Run the console script."""
    with streams.guard_stdout():
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
    """Take the options before the verb."""


for verb, line, text in (
    (plan.plan, "Show every dtype of every parameter, why, and what a step costs.", texts.PLAN),
    (plan.explain, "Show one parameter: its dtypes, their reasons, its slices.", texts.EXPLAIN),
    (plan.support, "Show which combinations are supported, and why others are not.", texts.SUPPORT),
    (check.check, "Run a training command, and show which dtypes it has.", texts.CHECK),
    (run.run, "Run a DeepSpeed command, unchanged, on zerodrift.", texts.RUN),
    (check.diff, "Compare two tables that check saved.", texts.DIFF),
    (audit.audit, "Measure what every dtype costs, and which pins pay.", texts.AUDIT),
    (check.drift, "Compare a trainer with a sampler, and show where drift comes from.", texts.DRIFT),
    (checkpoints.inspect, "Show what is in a checkpoint, and whether it is complete.", texts.INSPECT),
    (checkpoints.convert, "Convert checkpoints, safetensors and DeepSpeed checkpoints.", texts.CONVERT),
    (train.train, "Train a model as a job file says.", texts.TRAIN),
    (train.evaluate, "Evaluate a checkpoint of a job.", texts.EVALUATE),
    (train.data, "Show what a job is trained on.", texts.DATA),
    (train.replay, "Compute steps of a run again, and find where bits differ.", texts.REPLAY),
    (train.sample, "Continue a prompt with a trained model.", texts.SAMPLE),
    (machine.examples, "List the examples, or copy them.", texts.EXAMPLES),
    (machine.doctor, "Show what this machine has, what is slow on it, and why.", texts.DOCTOR),
):
    app.command(short_help=line, help=text)(verb)
