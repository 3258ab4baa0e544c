"""Show the dtypes of a run, compare tables, compare a trainer with a sampler, and measure what dtypes cost:
`check`, `diff`, `drift`, `audit`.

Invariant: `check` runs the command as it stands. Exit code 3 means a difference, 2 means nothing to compare.
"""

from __future__ import annotations

import json as json_module
import shlex
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import typer

from zerodrift.cli import options, streams
from zerodrift.cli.plan import numbers, require_model, write_file
from zerodrift.errors import ConfigError, ZerodriftError, several

if TYPE_CHECKING:
    from zerodrift.inspect.audit import Batch, Subject
    from zerodrift.inspect.check import RunRecord
    from zerodrift.plan import Plan


NOT_AS_EXPECTED = 3  # exit code for a difference

_LET_IT_TRAIN = "Let the command train for at least one optimizer step."


def check(
    command: options.Command,
    steps: options.Steps = 3,
    expect: options.Expect = None,
    save: options.SaveTable = None,
    html: options.HtmlTable = None,
    keep_going: options.KeepGoing = False,
    timeout: options.Timeout = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Run a training command, and show the dtypes of every parameter.

    The command runs unchanged, with any library; an observer starts in each of its Python processes. It ends
    after the watched steps, unless --keep-going is given. --expect compares the observed table with another
    table, a plan or a config. Exit code 2: no step was observed; 3: the run is not as expected.

    \b
    Examples:
      zerodrift check -- python examples/check/bf16.py
      zerodrift check -- torchrun --nproc-per-node 2 train.py
      zerodrift check --expect ds.json -- deepspeed train.py
      zerodrift check --save a.json -- torchrun train.py
      zerodrift check --expect a.json -- torchrun train.py

    From Python, and in notebooks: `with zerodrift.observe(model, optimizer) as seen: ...`, `seen.table()`.
    """
    with streams.errors(debug):
        from zerodrift.config import load
        from zerodrift.inspect.check import completed, encoded, run, run_findings, run_text, table, unexpected

        declared = None if expect is None else table.read_declaration(expect) or load(expect)
        seen = run(command, steps, keep_going, sys.stderr.fileno() if json else None, timeout)
        _require_record(seen, command, steps, timeout)
        processes = completed(seen.processes) if seen.processes[0].world > 1 else seen.processes[:1]
        others = [] if expect is None or declared is None else unexpected(declared, expect.name, processes)
        findings = [*others, *run_findings(processes)]
        if save is not None:
            write_file(save, encoded(processes, findings), "--save")
        if html is not None:
            from zerodrift.inspect.check import run_page

            write_file(html, run_page(processes, findings, _notes(seen, steps), shlex.join(command)))
        if json:
            streams.emit(encoded(processes, findings))
        else:  # the last line of the command may have no end
            streams.emit("\n" + run_text(processes, findings, _notes(seen, steps), **streams.layout()))
    if any(process.ended in ("crash", "broken") for process in seen.processes) or _ended_early(seen, steps):
        raise typer.Exit(streams.USAGE)
    if others:
        raise typer.Exit(NOT_AS_EXPECTED)


def _ended_early(seen: RunRecord, steps: int) -> bool:
    return (seen.code != 0 or seen.late) and any(process.steps < steps for process in seen.processes)


def _require_record(seen: RunRecord, command: list[str], steps: int, timeout: float | None) -> None:
    if any(process.models for process in seen.processes):
        return
    if seen.processes:
        got = "optimizer steps, but no forward with gradients enabled"
        notes = [note for process in seen.processes for note in process.notes]
        do = notes[0] if notes else "An update without a backward has no gradients to observe."
        raise ZerodriftError(" ".join(command), "must be a command that trains", got=got, do=do)
    if seen.late:
        must = f"must take {steps} optimizer steps within the time limit"
        do = "Raise `--timeout`, or watch fewer steps with `--steps`."
        raise ZerodriftError(" ".join(command), must, got=f"fewer in {timeout:g} seconds", do=do)
    ended = f"it ended with exit code {seen.code}" if seen.code >= 0 else f"signal {-seen.code} ended it"
    if seen.code < 0:
        got, do = ended, "It was killed before its first step."
    elif seen.failures:
        got, do = seen.failures[0], "The observer could not start in that Python."
    elif seen.silent and not any(process.models for process in seen.idle):
        got = f"processes that ended without a record; {ended}"
        do = "They were killed, called `os._exit`, or replaced themselves by another program."
    elif not seen.idle:
        got = f"no Python process that imports torch left a record; {ended}"
        do = "Python must read PYTHONPATH: use no `python -I`, `-E` or `-S`, and no container without it."
    elif any(model.parameters for process in seen.idle for model in process.models):
        notes = [note for process in seen.idle for note in process.notes]
        got = f"forwards, but no step of a torch optimizer; {ended}"
        do = notes[0] if notes else _LET_IT_TRAIN
    else:
        got, do = f"an import of torch, but no training; {ended}", _LET_IT_TRAIN
    if seen.code > 0:
        do = f"If the command failed, its own message is above. {do}"
    raise ZerodriftError(" ".join(command), "must be a command that trains", got=got, do=do)


def _notes(seen: RunRecord, steps: int) -> list[str]:
    notes = list(seen.failures)
    for process in (process for process in seen.processes if process.steps < steps):
        how = "crashed" if process.ended == "crash" else "ended"
        notes.append(f"Rank {process.rank} {how} after {process.steps} of {steps} steps.")
    if seen.late:
        notes.append("The command was ended by `--timeout`.")
    elif _ended_early(seen, steps):
        notes.append(f"The command ended with exit code {seen.code}.")
    world = seen.processes[0].world
    if world == 1 and len(seen.processes) > 1:
        alone = f"{len(seen.processes)} processes trained independently, without a process group."
        notes.append(f"{alone} The table shows the first one.")
    if len(seen.processes) < world:
        some = f"{len(seen.processes)} of {world} ranks left a record"
        notes.append(f"{some}: the others are on another host, or ended before they wrote one.")
    return notes


def diff(a: options.TableA, b: options.TableB, debug: options.Debug = False) -> None:
    """Compare two tables that `check --save` wrote, parameter by parameter and column by column.

    Exit code 3: they differ.

    \b
    Example:
      zerodrift diff before.json after.json
    """
    with streams.errors(debug):
        from zerodrift.inspect.check import differences, read

        found = differences(read(a), read(b))
        if not found:
            streams.emit("The tables are the same.\n")
            return
        streams.emit("".join(f"{line}\n" for line in found))
    raise typer.Exit(NOT_AS_EXPECTED)


def drift(
    config: options.TrainerConfig,
    model: options.ModelOfTrainer,
    tokens: options.TokenFile,
    weights: options.TrainedWeights = None,
    sent: options.SentFolder = None,
    loaded: options.LoadedFolder = None,
    sampler: options.SamplerTable = None,
    recorded: options.RecordedFile = None,
    bar: options.Bar = 0.015,
    set_: options.Set = None,
    auto: options.Auto = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Compare a trainer with a sampler, and show which difference their drift comes from.

    The trainer's model is run on the tokens with one tensor or dtype of the sampler at a time, and with all
    but one. Tensors that differ from the trained ones in any bit are named first. Exit code 0: the drift is
    within --bar; 2: nothing to compare; 3: the drift is above --bar, or a tensor differs.

    \b
    Examples:
      zerodrift drift config.yaml --model path/to/model \\
        --weights runs/a --sent exported --tokens ids.npy
      zerodrift drift config.yaml --model path/to/model \\
        --sampler vllm.yaml --tokens ids.jsonl
      zerodrift drift precision.json --model path/to/model \\
        --recorded server.jsonl --tokens server.jsonl
    """
    with streams.errors(debug):
        from zerodrift.inspect.audit import read_ids, read_recorded
        from zerodrift.inspect.drift import (
            SamplerSide,
            compare_sides,
            comparison_json,
            comparison_text,
            load_trainer,
            read_sampler_dtypes,
        )
        from zerodrift.train import checkpoints_at

        sequences = read_ids(tokens)
        dtypes = None if sampler is None else read_sampler_dtypes(sampler)
        logprobs = None if recorded is None else read_recorded(recorded, sequences)
        other = SamplerSide(sent, loaded, dtypes, logprobs)
        trained = None if weights is None else checkpoints_at(weights)
        with streams.progress(f"replaying {model}"):
            side = load_trainer(config, model, trained, numbers(auto or ()), tuple(set_ or ()))
            found = compare_sides(side, other, sequences, bar)
        if json:
            streams.emit(comparison_json(found))
        else:
            there = [str(path) for path in (sent, loaded, sampler, recorded) if path is not None]
            count = sum(map(len, sequences))
            facts = [
                ("trainer", f"{config}, {weights or model}"),
                ("other side", ", ".join(there)),
                ("tokens", f"{count:,} in {several(len(sequences), 'sequence')}, {tokens}"),
            ]
            streams.emit(comparison_text(found, facts, **streams.layout()))
    if not found.within:
        raise typer.Exit(NOT_AS_EXPECTED)


def audit(
    source: options.JobOrConfig,
    model: options.ModelOfConfig = None,
    weights: options.WeightsOfModel = None,
    tokens: options.TokensOfAudit = None,
    batches: options.Batches = 4,
    budget: options.Budget = "1%",
    of: options.BudgetOf = "rest",
    confirm: options.Confirm = 8,
    narrow: options.Narrow = None,
    set_: options.Set = None,
    html: options.HtmlAudit = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure what every dtype of a model costs in log-probabilities, and propose pins that reduce the cost.

    Three passes estimate every cell. The most costly cells are replayed, one at a time. Pins are added while
    they fit the budget, each set of pins is run, and its rules are printed. Defects are named first. Under
    torchrun every rank does a share of the work.

    \b
    Examples:
      zerodrift audit examples/jobs/lab.yaml
      zerodrift audit config.yaml --model path/to/model \\
        --data ids.npy --html audit.html
      zerodrift audit config.yaml \\
        --model package.module:function \\
        --budget 0.5% --of wire --narrow bytes
    """
    with streams.errors(debug):
        if of not in ("rest", "peak", "wire"):
            raise typer.BadParameter("must be rest, peak or wire", param_hint="--of")
        share = _parse_share(budget)
        from zerodrift.inspect.audit import audit_subject, load_subject, parse_goal, this_rank
        from zerodrift.train import is_job

        goal = None if narrow is None else parse_goal(narrow, "--narrow")
        rank = this_rank()
        with nullcontext() if rank else streams.progress(f"auditing {source}") as report:
            if is_job(source):
                subject = _load_job(source, set_ or [], batches, (model, weights, tokens))
            else:
                subject = load_subject(source, require_model(model), weights, tokens, batches, set_ or [])
            found = audit_subject(*subject, share, cast(Any, of), confirm, report, goal)
        if rank:
            return
        if html is not None:
            from zerodrift.inspect.audit import audit_page

            write_file(html, audit_page(found))
        if json:
            streams.emit(json_module.dumps(found.to_json(), indent=2) + "\n")
        else:
            streams.emit(found.text(**streams.layout()))


def _parse_share(text: str) -> float:
    """Parse a share: `1%` or `0.01`."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError("--budget", "must be a share such as 1% or 0.01", got=repr(text))
    return value


def _load_job(
    source: str, overrides: list[str], count: int, others: tuple[Any, ...]
) -> tuple[Plan, Subject, list[Batch]]:
    from zerodrift.train import job_to_audit, read_job

    if any(option is not None for option in others):
        must = "must be left out with a job, which names its model and data"
        do = "Override the job's: `--set model.source=...`."
        raise ConfigError("--model, --weights, --data", must, got="one of them", do=do)
    return job_to_audit(*read_job(source, overrides), count)
