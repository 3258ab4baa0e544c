"""The command line: thin verbs over the library.

Options are in `options`, streams and exit codes in `streams`. The other files hold the verbs, whose
docstrings are their help. The examples in them run as they are, except for their paths. Verbs import the
library when they run, so that `--help` is instant and needs no torch.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from zerodrift.cli import check, machine, plan, run, streams, train
from zerodrift.errors import did_you_mean
from zerodrift.versions import __version__

OTHER_NAMES = {
    "export": "`zerodrift convert` writes the weights of a run; `train` exports them at its end.",
    "report": "`zerodrift train` writes `report.html` in a run's folder; `inspect` shows checkpoints.",
    "resume": "`zerodrift train JOB` resumes a run that was stopped.",
    "compare": "`zerodrift diff` compares two tables, and `zerodrift drift` a trainer with a sampler.",
    **{word: f"Did you mean `plan --{word}`?" for word in ("simulate", "trace")},
    "merge": "Did you mean `convert --merge`?",
    **dict.fromkeys(("eval", "validate", "test"), "Did you mean `evaluate`?"),
    **dict.fromkeys(("generate", "chat", "infer"), "Did you mean `sample`?"),
    **dict.fromkeys(("launch", "exec"), "Did you mean `run`?"),
    **dict.fromkeys(("init", "new"), "Did you mean `examples --copy`?"),
    **dict.fromkeys(("version", "info", "env"), "Did you mean `--version` or `doctor`?"),
}
"""Name of a command in other tools -> advice on the command of zerodrift."""


class _Advised:
    """A command or group that suggests the nearest option for an unknown one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc]
        except Exception as error:
            if not hasattr(error, "possibilities"):  # typer's and click's unknown option
                raise
            wrong = error.option_name  # type: ignore[attr-defined]
        known = [name for each in ctx.command.get_params(ctx) for name in each.opts]
        return ctx.fail(f"No such option: {wrong}. {did_you_mean(wrong, known, 1)}".rstrip())


class Verb(_Advised, TyperCommand):
    """A command whose help does not show the types of arguments."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [self.options_metavar or "", *(name for name, _ in self._records(ctx, "argument"))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            if rows := self._records(ctx, kind):
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _records(self, ctx: Any, kind: str) -> list[tuple[str, str]]:
        return [
            (each.metavar or "" if kind == "argument" else record[0], record[1])
            for each in self.get_params(ctx)
            if each.param_type_name == kind and (record := each.get_help_record(ctx))
        ]


class Verbs(_Advised, TyperGroup):
    """The group of all commands, which suggests one for an unknown name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if not ctx.resilient_parsing and self.get_command(ctx, word) is None and not word.startswith("-"):
            hint = OTHER_NAMES.get(word) or did_you_mean(word, self.commands, 1)
            ctx.fail(f"No such command: {word!r}. {hint or '`zerodrift --help` lists all.'}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="zerodrift",
    cls=Verbs,
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
            is_narrow = streams.layout()["width"] < 80
            lines = [
                f"  {question}\n      {command}" if is_narrow else f"  {question:35} {command}"
                for question, command in QUESTIONS
            ]
            streams.emit("\n".join([f"zerodrift {__version__}", "", *lines, ""]))


for verb, line in (
    (plan.plan, "Show every dtype of every parameter, its reason, and what a step costs."),
    (plan.explain, "Show one parameter: its dtypes, their reasons, its slices."),
    (plan.support, "Show which combinations are supported, and why others are not."),
    (check.check, "Run a training command, and show the dtypes of every parameter."),
    (run.run, "Run a DeepSpeed command, unchanged, on zerodrift."),
    (check.diff, "Compare two tables that check saved."),
    (check.audit, "Measure what every dtype costs, and propose pins."),
    (check.drift, "Compare a trainer with a sampler, and show where drift comes from."),
    (train.inspect, "Show a checkpoint, and whether it is complete."),
    (train.convert, "Convert checkpoints, safetensors and DeepSpeed checkpoints."),
    (train.train, "Train the model of a job file."),
    (train.evaluate, "Evaluate a checkpoint of a job."),
    (train.data, "Show what a job is trained on."),
    (train.replay, "Compute steps of a run again, and find where bits differ."),
    (train.sample, "Continue a prompt with a trained model."),
    (machine.examples, "List the examples, or copy them."),
    (machine.doctor, "Show what this machine has, what is slow on it, and why."),
):
    settings = {"allow_interspersed_args": verb not in (check.check, run.run)}  # their command has options
    app.command(cls=Verb, short_help=line, context_settings=settings)(verb)
line = "Explain an error, a finding or a command by its name."
app.command("help", cls=Verb, short_help=line)(machine.explain_name)
