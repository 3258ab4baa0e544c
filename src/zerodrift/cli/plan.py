"""Plan without starting ranks: `plan`, `explain`, `support`, `plan --simulate`.

Invariant: no weights are read, and no process group or device is used.
"""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from zerodrift.cli import options, streams
from zerodrift.errors import ConfigError, Problems, ZerodriftError
from zerodrift.files import kind
from zerodrift.legible import legible

if TYPE_CHECKING:
    from zerodrift.plan import Plan, Timeline


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
    device: options.Device = None,
    simulate: options.Simulate = None,
    sweep: options.Sweep = False,
    tokens: options.TokensOfSample = None,
    recompute: options.Recompute = False,
    debug: options.Debug = False,
) -> None:
    """Show every dtype of every parameter, its reason, and what a step costs.

    Nothing is started and no weights are read, so a laptop can plan for thousands of ranks.

    \b
    Examples:
      zerodrift plan examples/jobs/lab.yaml --world-size 8
      zerodrift plan config.yaml --model X --html plan.html
      zerodrift plan config.yaml --model X --simulate h100 \\
        --tokens 4096

    Instead of the plan, --trace prints the dtypes of every operation of a step, and --simulate the time of a
    step. Pages: docs/plan.md, docs/simulate.md.
    """
    with streams.errors(debug):
        simulated = simulate is not None
        others = trace or rows is not None or html is not None or micro_batches is not None
        of_simulate = sweep or recompute or tokens is not None
        for is_wrong, must in (
            (trace and rows is not None, "give --trace or --rows, not both"),
            (inputs and not trace and not simulated, "--inputs is for --trace and --simulate"),
            (device and not trace, "--device is for --trace"),
            (not simulated and of_simulate, "--sweep, --tokens and --recompute need --simulate CLUSTER"),
            (simulated and others, _NOT_SIMULATED),
            (simulated and inputs and tokens is not None, "give --inputs or --tokens, not both"),
        ):
            if is_wrong:
                raise typer.BadParameter(must)
        with streams.progress(f"{'simulating' if simulated else 'planning'} {model or config}"):
            source = _plan_source(config, model, world_size, set_ or (), auto or ())
            if simulate is not None:
                text = _simulation_text(source, simulate, sweep, tokens, recompute, inputs, json)
            else:
                planned = source.plan_on(source.ranks)
                traced = _trace_text(planned, source, inputs, device, json) if trace else ""
                text = _plan_text(planned, micro_batches, rows, json, html) if html or not trace else ""
                text = traced or text
        streams.emit(text)


_NOT_SIMULATED = (
    "give --simulate without --trace, --rows, --html and --micro-batches; "
    "`--set gradient_accumulation_steps=M` sets micro-batches"
)


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
    """Show one parameter: its dtypes, the reason of each, and which rank owns which part.

    \b
    Examples:
      zerodrift explain examples/jobs/lab.yaml \\
        model.layers.0.mlp.gate.weight
      zerodrift explain config.yaml --model path/to/model \\
        model.layers.3.mlp.router.weight
    """
    with streams.errors(debug):
        from zerodrift.report import as_json, terminal
        from zerodrift.report import explain as explained

        with streams.progress(f"planning {model or config}"):
            source = _plan_source(config, model, world_size, set_ or (), auto or ())
            planned = source.plan_on(source.ranks)
            explanation = explained(planned, parameter)
        if json:
            streams.emit(as_json.explanation_json(explanation, planned))
        else:
            streams.emit(terminal.explanation_text(explanation, planned.digest, **streams.layout()))


def support(
    markdown: options.Markdown = False, json: options.Json = False, debug: options.Debug = False
) -> None:
    """Show which modes, accumulate dtypes, states, stages, pipelines and backends work together.

    \b
    Examples:
      zerodrift support
      zerodrift support --markdown > support.md
    """
    with streams.errors(debug):
        from zerodrift.policy import states, table
        from zerodrift.report import as_json, markdown_text, support_markdown

        if markdown and json:
            raise typer.BadParameter("give --markdown or --json, not both")
        tables = table(), states()
        if json:
            streams.emit(as_json.support_json(*tables))
        else:
            page, layout = support_markdown(*tables), streams.layout()
            wide = {**layout, "width": max(70, layout["width"])}  # as wide as its tables are
            streams.emit(page if markdown else markdown_text(page, **wide))


@dataclass(frozen=True, slots=True)
class PlanSource:
    """A config or a job, and a function that plans its model."""

    plan_on: Callable[..., Plan]
    """Plans the model on some ranks, under more overrides."""
    ranks: int
    model: str
    tokens: int | None = None
    """Tokens of a sample. None for a config, which does not say it."""
    recompute: bool | None = None
    """True if a job recomputes activations. None for a config."""
    device: str = "auto"  # `run.device` of a job
    digest_every: int = 0  # `run.digest_every` of a job


def _plan_source(
    source: str, model: str | None, world_size: int | None, overrides: Sequence[str], auto: Sequence[str]
) -> PlanSource:
    from zerodrift.api import make_plan
    from zerodrift.config import load, without_torch_classes
    from zerodrift.model import describe
    from zerodrift.train import is_job

    if is_job(source):
        return _job_source(source, model, world_size, overrides, auto)

    name, given, spec = require_model(model), numbers(auto), functools.cache(describe)

    def of_config(ranks: int, more: Sequence[str] = ()) -> Plan:
        config = without_torch_classes(load(source, (*overrides, *more)))  # its mistakes come first
        return make_plan(config, spec(name), ranks, auto=given)

    return PlanSource(of_config, world_size or 1, name)


def _job_source(
    source: str, model: str | None, world_size: int | None, overrides: Sequence[str], auto: Sequence[str]
) -> PlanSource:
    from zerodrift.api import make_plan
    from zerodrift.train import planned_from, read_job

    if model is not None or auto:
        do = "Override the job's: `--set model.source=...`, `--set auto={KEY: NUMBER}`."
        must = "must be left out with a job, which has its own"
        raise ConfigError("--model and --auto", must, got="a job file", do=do)
    job, config = read_job(source, overrides)
    built_on = functools.cache(functools.partial(planned_from, job, config))

    def of_job(ranks: int, more: Sequence[str] = ()) -> Plan:
        built, values = built_on(ranks)
        return make_plan(config, built, ranks, auto=values, overrides=tuple(more))

    of, run = job.model, job.run
    keys = of.source, job.data.block, of.activation_checkpointing, run.device, run.digest_every
    return PlanSource(of_job, world_size or job.run.nproc or 1, *keys)


def require_model(model: str | None) -> str:
    if model is None:
        raise ConfigError("--model", "must name the model of a config", got="none", do="Or give a job file.")
    return model


def _plan_text(
    planned: Plan, micro_batches: int | None, rows: str | None, json: bool, html: Path | None
) -> str:
    """Return the text that `plan` prints. The page is written first: if it fails, nothing is printed."""
    from zerodrift.plan import cost
    from zerodrift.report import as_json, explain_row, group_rows, list_rows, matching, terminal

    bill, timeline = cost(planned, micro_batches), _timeline(planned)
    if html is not None:
        from zerodrift.report import plan_page

        write_file(html, plan_page(planned, bill, group_rows(planned), timeline))
    if rows is None:
        if json:
            return as_json.plan_json(planned, bill, timeline)
        return terminal.plan_text(planned, bill, group_rows(planned), timeline, **streams.layout())
    chosen = matching(planned, rows, "--rows")
    if json:
        return as_json.rows_json((explain_row(planned, index) for index in chosen), planned)
    return terminal.rows_text(planned, list_rows(planned, chosen), **streams.layout())


def _trace_text(planned: Plan, source: PlanSource, inputs: str | None, device: str | None, json: bool) -> str:
    import torch

    from zerodrift.inspect.check import hidden, nondeterministic
    from zerodrift.inspect.trace import trace
    from zerodrift.model import build_runnable, inputs_for
    from zerodrift.report import as_json, trace_text

    module = build_runnable(source.model)
    seen = trace(planned, module, inputs_for(module, inputs))
    found = hidden(planned, seen)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = device or (here if source.device == "auto" else source.device)
    found = [*nondeterministic(planned, seen, device, source.digest_every), *found]
    if json:
        return as_json.trace_json(planned, seen, found)
    return trace_text(planned, seen, found, **streams.layout())


def _timeline(planned: Plan) -> Timeline | None:
    """Return the order of a pipeline from torch's schedule, or None without a pipeline."""
    if planned.policy.pipeline is None:
        return None
    from zerodrift.pipeline import timeline

    return timeline(planned)


def numbers(texts: Sequence[str]) -> dict[str, float | list[float]]:
    """Parse `--auto` texts into numbers or lists of numbers (`betas=0.9,0.95`). Collect all mistakes."""
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
            do = "For example train_batch_size=256."
            problems.add("--auto", "must be KEY=NUMBER", got=repr(text), do=do)
    problems.raise_as(ConfigError)
    return values


def write_file(path: Path, text: str, option: str = "--html") -> None:
    """Write the file of an option and name its path on stderr."""
    try:
        if other := kind(path):
            raise OSError(errno.EINVAL, other)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        must, got = "must be a file that can be written", f"{str(path)!r}: {reason}"
        raise ZerodriftError(option, must, got=got) from None
    print(f"zerodrift: wrote {legible(str(path))}", file=sys.stderr)


def _simulation_text(
    step: PlanSource,
    cluster_name: str,
    sweeps: bool,
    tokens: int | None,
    recompute: bool,
    inputs: str | None,
    json: bool,
) -> str:
    """Simulate one step, or a sweep of them, and return the report."""
    from zerodrift.inspect import simulate
    from zerodrift.model import build_runnable, inputs_for

    cluster, path = simulate.read_cluster(cluster_name)
    if step.recompute is not None and recompute:
        must = "must be left out with a job, which sets it"
        do = "Override the job's: `--set model.activation_checkpointing=true`."
        raise ConfigError("--recompute", must, got="a job file", do=do)
    length = None if inputs is not None else tokens or step.tokens
    if length is None and inputs is None:
        must = "must be the number of tokens of a sample"
        raise ConfigError("--tokens", must, got="none", do="Or give a job file.")
    planned = step.plan_on(step.ranks)
    order = _timeline(planned)
    simulate.require_known_order(planned, cluster, order)
    samples = max(1, planned.policy.batch.micro)
    module = build_runnable(step.model)
    given = inputs_for(module, inputs) if length is None else simulate.sized_inputs(module, samples, length)
    work = simulate.count_work(planned, module, given)
    if cluster_name in simulate.built_in():
        print(f"zerodrift: cluster {cluster_name} is {legible(str(path))}", file=sys.stderr)
    again = recompute if step.recompute is None else step.recompute
    if sweeps:
        plans = functools.partial(step.plan_on, step.ranks)
        fit, others = simulate.sweep(planned, plans, _timeline, work, cluster)
        if json:
            return simulate.sweep_json(cluster_name, fit, others)
        own = simulate.own_choice(planned, again)
        return simulate.sweep_text(planned, work, cluster_name, fit, others, own, **streams.layout())
    found = simulate.simulate(planned, work, cluster, recompute=again, timeline=order)
    plan_on, world = functools.cache(step.plan_on), planned.mesh.world
    fewest = {
        how: simulate.fewest_ranks(plan_on, _timeline, work, cluster, world, recomputes)
        for how, recomputes in (("activations kept", False), ("with recomputation", True))[again:]
    }
    if json:
        return simulate.simulation_json(planned, work, cluster_name, found, fewest)
    return simulate.simulation_text(planned, work, cluster_name, found, fewest, **streams.layout())
