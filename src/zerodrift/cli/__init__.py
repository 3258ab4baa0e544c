"""The command line: thin verbs over the library.

Options are in `options`, streams and exit codes in `streams`. The other files hold the verbs, whose
docstrings are their help: every example in them runs as it stands, except for its paths. Verbs import other
rooms when they run, so that `--help` is instant and needs no torch.

Invariant: a refusal ends as one message and exit code 2, never as a traceback.
"""

from __future__ import annotations

from typing import Annotated

import typer

from zerodrift.cli import check, machine, plan, run, streams, train
from zerodrift.versions import __version__

app = typer.Typer(
    name="zerodrift",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)


def main() -> None:
    with streams.guard_stdout():
        app(prog_name="zerodrift")


def _version(wanted: bool) -> None:
    if wanted:
        with streams.errors(debug=False):
            streams.emit(f"zerodrift {__version__}\n")
        raise typer.Exit()


QUESTIONS = (
    ("What is wrong with my run?", "zerodrift check -- torchrun train.py"),
    ("What will my config do?", "zerodrift plan config.yaml --model X"),
    ("Can I keep my DeepSpeed script?", "zerodrift run -- deepspeed train.py"),
    ("How do I train a model?", "zerodrift train job.yaml"),
    ("What does each dtype cost?", "zerodrift audit job.yaml"),
    ("How do trainer and sampler differ?", "zerodrift drift config.yaml --model X"),
    ("What does this error mean?", "zerodrift help NAME"),
    ("What does this machine have?", "zerodrift doctor"),
    ("Where do I begin?", "zerodrift examples --copy"),
    ("What else is there?", "zerodrift --help"),
)
"""Question -> the command that answers it."""


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Sharded mixed-precision training in which every dtype is decided in one readable table.

    `zerodrift` alone lists questions and the commands that answer them; `zerodrift help NAME` explains an
    error or a finding.
    """
    if context.invoked_subcommand is None:
        with streams.errors(debug=False):
            is_narrow = streams.columns(80) < 80
            lines = [
                f"  {question}\n      {command}" if is_narrow else f"  {question:35} {command}"
                for question, command in QUESTIONS
            ]
            streams.emit("\n".join([f"zerodrift {__version__}", "", *lines, ""]))


for verb, line in (
    (plan.plan, "Show every dtype of every parameter, why, and what a step costs."),
    (plan.explain, "Show one parameter: its dtypes, their reasons, its slices."),
    (plan.support, "Show which combinations are supported, and why others are not."),
    (check.check, "Run a training command, and show which dtypes it has."),
    (run.run, "Run a DeepSpeed command, unchanged, on zerodrift."),
    (check.diff, "Compare two tables that check saved."),
    (check.audit, "Measure what every dtype costs, and which pins pay."),
    (check.drift, "Compare a trainer with a sampler, and show where drift comes from."),
    (train.inspect, "Show what is in a checkpoint, and whether it is complete."),
    (train.convert, "Convert checkpoints, safetensors and DeepSpeed checkpoints."),
    (train.train, "Train a model as a job file says."),
    (train.evaluate, "Evaluate a checkpoint of a job."),
    (train.data, "Show what a job is trained on."),
    (train.replay, "Compute steps of a run again, and find where bits differ."),
    (train.sample, "Continue a prompt with a trained model."),
    (machine.examples, "List the examples, or copy them."),
    (machine.doctor, "Show what this machine has, what is slow on it, and why."),
):
    app.command(short_help=line)(verb)
app.command("help", short_help="Explain an error or a finding by its name.")(machine.explain_name)
