"""The verbs that start nothing: `plan`, `explain`, `support`.

Invariant: no weights are read, and no process group and no device is asked for.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from zerodrift.cli import options, streams
from zerodrift.cli.simulating import SimulationOptions, StepSource, simulated
from zerodrift.errors import ConfigError, Problems, ZerodriftError
from zerodrift.files import kind
from zerodrift.legible import legible

if TYPE_CHECKING:
    from zerodrift.plan.table import Plan
    from zerodrift.plan.timeline import Timeline


def plan(
    config: options.Config,
    model: options.Model = None,
    world_size: options.WorldSize = None,
    micro_batches: options.MicroBatches = None,
    rows: options.Rows = None,
    set_: options.Set = None,
    auto: options.Auto = None,
    json: options.Json = False,
    html: options.Html = None,
    trace: options.Trace = False,
    inputs: options.Inputs = None,
    simulate: options.Simulate = None,
    sweep: options.Sweep = False,
    tokens: options.TokensOfSample = None,
    recompute: options.Recompute = False,
    debug: options.Debug = False,
) -> None:
    """Show every dtype of every parameter, why it is so, and what a step costs."""
    with streams.errors(debug):
        if trace and rows is not None:
            raise typer.BadParameter("give --trace or --rows, not both")
        if inputs is not None and not trace and simulate is None:
            raise typer.BadParameter("--inputs is for --trace and --simulate")
        if simulate is None and (sweep or recompute or tokens is not None):
            raise typer.BadParameter("--sweep, --tokens and --recompute are for --simulate")
        if simulate is not None:
            if trace or rows is not None or html is not None or micro_batches is not None:
                raise typer.BadParameter(
                    "give --simulate without --trace, --rows, --html and --micro-batches; "
                    "`--set gradient_accumulation_steps=M` sets micro-batches"
                )
            if inputs is not None and tokens is not None:
                raise typer.BadParameter("give --inputs or --tokens, not both")
            typed = SimulationOptions(simulate, sweep, tokens, recompute, inputs, json)
            with streams.progress(f"simulating {model or config}"):
                text = simulated(_step_source(config, model, world_size, set_ or (), auto), typed)
            streams.emit(text)
            return
        with streams.progress(f"planning {model or config}"):
            planned, source = _made(config, model, world_size, set_, auto)
            traced = _trace_text(planned, source, inputs, json) if trace else ""
            text = _plan_text(planned, micro_batches, rows, json, html) if html or not trace else ""
            text = traced or text
        streams.emit(text)


def explain(
    config: options.Config,
    parameter: options.Parameter,
    model: options.Model = None,
    world_size: options.WorldSize = None,
    set_: options.Set = None,
    auto: options.Auto = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show one parameter: its dtypes, what set each of them, and which rank owns which part."""
    with streams.errors(debug):
        from zerodrift.report import as_json, terminal
        from zerodrift.report.explain import explain as explained

        with streams.progress(f"planning {model or config}"):
            planned, _ = _made(config, model, world_size, set_, auto)
            explanation = explained(planned, parameter)
        if json:
            streams.emit(as_json.explanation_json(explanation, planned))
        else:
            streams.emit(terminal.explanation_text(explanation, planned.digest, **streams.look()))


def support(
    markdown: options.Markdown = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show which modes, accumulate dtypes, states, stages, pipelines and backends work together."""
    with streams.errors(debug):
        from zerodrift.policy.support import states, table
        from zerodrift.report import as_json
        from zerodrift.report.support import support_markdown, support_text

        if markdown and json:
            raise typer.BadParameter("give --markdown or --json, not both")
        if json:
            streams.emit(as_json.support_json(table(), states()))
        else:
            tables = table(), states()
            streams.emit(support_markdown(*tables) if markdown else support_text(*tables, **streams.look()))


# --- work of the verbs --------------------------------------------------------------------------------


def _made(
    config: str,
    model: str | None,
    world_size: int | None,
    overrides: Sequence[str] | None,
    auto: Sequence[str] | None,
) -> tuple[Plan, str]:
    """A plan, and what its model is."""
    if is_job(config):
        return _of_job(config, model, world_size, overrides or (), auto)
    if model is None:
        raise _needs_model()
    from zerodrift.api import make_plan

    given = numbers(auto or ())
    return make_plan(config, model, world_size or 1, auto=given, overrides=tuple(overrides or ())), model


def is_job(source: str) -> bool:
    """Whether a file has a job's blocks."""
    from zerodrift.config.tree import tree_of

    try:
        _, tree, _ = tree_of(source, "job")
    except ConfigError:
        return False
    return isinstance(tree, Mapping) and "data" in tree and "model" in tree


def _of_job(
    source: str,
    model: str | None,
    world_size: int | None,
    overrides: Sequence[str],
    auto: Sequence[str] | None,
) -> tuple[Plan, str]:
    from zerodrift.train.job_file import read_job
    from zerodrift.train.tools.outline import plan_of

    _require_own(model, auto)
    job, config = read_job(source, overrides)
    return plan_of(job, config, world_size or job.run.nproc or 1), job.model.source


def _require_own(model: str | None, auto: Sequence[str] | None) -> None:
    """That a job is not given what it has."""
    if model is not None or auto:
        raise ConfigError(
            "--model and --auto",
            "must be left out with a job, which has its own",
            got="a job file",
            do="Override the job's: `--set model.source=...`, `--set auto={KEY: NUMBER}`.",
        )


def _step_source(
    source: str,
    model: str | None,
    world_size: int | None,
    overrides: Sequence[str],
    auto: Sequence[str] | None,
) -> StepSource:
    """What a simulation plans again and again, each time with other overrides."""
    from zerodrift.api import make_plan
    from zerodrift.model.sources import describe

    if not is_job(source):
        if model is None:
            raise _needs_model()
        spec, given, world = describe(model), numbers(auto or ()), world_size or 1

        def of_config(more: Sequence[str]) -> Plan:
            return make_plan(source, spec, world, auto=given, overrides=(*overrides, *more))

        return StepSource(of_config, model, _timeline)
    from zerodrift.train.job_file import read_job, worded_for_a_job
    from zerodrift.train.tools.outline import planned_from

    _require_own(model, auto)
    job, config = read_job(source, overrides)
    ranks = world_size or job.run.nproc or 1
    built, values = planned_from(job, config, ranks)

    @worded_for_a_job()
    def of_job(more: Sequence[str]) -> Plan:
        return make_plan(config, built, ranks, auto=values, overrides=tuple(more))

    again = job.model.activation_checkpointing
    return StepSource(of_job, job.model.source, _timeline, job.data.block, again)


def _needs_model() -> ConfigError:
    return ConfigError("--model", "must name the model of a config", got="none", do="Or give a job file.")


def _plan_text(
    planned: Plan, micro_batches: int | None, rows: str | None, json: bool, html: Path | None
) -> str:
    """What `plan` prints. The page is written first: if it cannot be, nothing else is said."""
    from zerodrift.plan.cost import cost
    from zerodrift.report import as_json, names, terminal
    from zerodrift.report.explain import explain_row
    from zerodrift.report.rows import grouped, single

    bill, timeline = cost(planned, micro_batches), _timeline(planned)
    if html is not None:
        from zerodrift.report.page import plan_page

        write_page(html, plan_page(planned, bill, grouped(planned), timeline))
    if rows is None:
        if json:
            return as_json.plan_json(planned, bill, timeline)
        return terminal.plan_text(planned, bill, grouped(planned), timeline, **streams.look())
    chosen = names.matching(planned, rows, "--rows")
    if json:
        return as_json.rows_json((explain_row(planned, index) for index in chosen), planned)
    return terminal.rows_text(planned, single(planned, chosen), **streams.look())


def _trace_text(planned: Plan, model: str, inputs: str | None, json: bool) -> str:
    from zerodrift.inspect.check.hidden import hidden
    from zerodrift.inspect.trace.dry_run import trace
    from zerodrift.model.inputs import inputs_for
    from zerodrift.model.sources import build_runnable
    from zerodrift.report import as_json
    from zerodrift.report.trace import trace_text

    module = build_runnable(model)
    seen = trace(planned, module, inputs_for(module, inputs))
    found = hidden(planned, seen)
    if json:
        return as_json.trace_json(planned, seen, found)
    return trace_text(planned, seen, found, color=streams.color())


def _timeline(planned: Plan) -> Timeline | None:
    """The order of a pipeline, which is torch's to say; None without a pipeline."""
    if planned.policy.pipeline is None:
        return None
    from zerodrift.pipeline.schedules import timeline

    return timeline(planned)


def numbers(texts: Sequence[str]) -> dict[str, float | list[float]]:
    """`--auto` texts as numbers, or pairs of them (`betas=0.9,0.95`); all that are wrong at once."""
    problems = Problems()
    values: dict[str, float | list[float]] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        try:
            read = [float(part) for part in value.split(",")]
            values[key.strip()] = read[0] if len(read) == 1 else read
        except ValueError:
            separator = ""
        if not separator or not key.strip():
            problems.add(
                "--auto", "must be KEY=NUMBER", got=repr(text), do="For example train_batch_size=256."
            )
    problems.raise_as(ConfigError)
    return values


def write_page(path: Path, text: str) -> None:
    try:
        if other := kind(path):
            raise OSError(errno.EINVAL, other)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ZerodriftError(
            "--html", "must be a file that can be written", got=f"{str(path)!r}: {reason}"
        ) from None
    print(f"zerodrift: wrote {legible(str(path))}", file=sys.stderr)
