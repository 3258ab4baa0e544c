"""Run the reference trainer: `train`, `evaluate`, `data`, `replay`, `sample`.

Invariant: the exit code is that of the trainer.
"""

from __future__ import annotations

import math
import shutil

import typer

from zerodrift.cli import options, streams
from zerodrift.errors import ConfigError


def train(
    job: options.Job,
    set_: options.SetInJob = None,
    nproc: options.Nproc = None,
    plan: options.WholePlan = False,
    dry: options.DryRun = False,
    debug: options.Debug = False,
) -> None:
    """Train a model as a job file says, with checkpoints, a report, and the exported model at the end."""
    with streams.errors(debug):
        from zerodrift.train.loop.start import dry_run
        from zerodrift.train.loop.start import train as run

        if dry:
            dry_run(job, tuple(set_ or ()), nproc, plan)
            return
        code = run(job, tuple(set_ or ()), nproc, debug, plan)
    if code:
        raise typer.Exit(code)


def evaluate(
    job: options.Job, set_: options.SetInJob = None, nproc: options.Nproc = None, debug: options.Debug = False
) -> None:
    """Evaluate a checkpoint of a job on what is held out, and train nothing."""
    with streams.errors(debug):
        from zerodrift.train.loop.start import evaluate as run

        code = run(job, tuple(set_ or ()), nproc, debug)
    if code:
        raise typer.Exit(code)


def data(job: options.Job, set_: options.SetInJob = None, debug: options.Debug = False) -> None:
    """Show what a job is trained on: what was read, and samples with what is learned marked."""
    with streams.errors(debug):
        from zerodrift.train.job_file import read_job
        from zerodrift.train.report.summary import preview

        with streams.progress(f"reading the data of {job}"):
            read, _ = read_job(job, tuple(set_ or ()))
            text = preview(read, color=streams.color(), width=shutil.get_terminal_size().columns)
        streams.emit(text)


def replay(
    run: options.Run,
    first: options.FirstStep = None,
    last: options.LastStep = None,
    nproc: options.ReplayNproc = None,
    debug: options.Debug = False,
) -> None:
    """Compute steps of a run once more, and say where bits first differ from what it recorded."""
    with streams.errors(debug):
        from zerodrift.train.tools.replay import replay as again

        code = again(run, first, last, nproc, debug)
    if code:
        raise typer.Exit(code)


def sample(
    run: options.Run,
    prompt: options.Prompt = "",
    tokens: options.Tokens = 200,
    temperature: options.Temperature = 0.8,
    top: options.Top = 40,
    seed: options.Seed = 0,
    chat: options.Chat = False,
    debug: options.Debug = False,
) -> None:
    """Continue a prompt with a trained model, to see what it has learned."""
    with streams.errors(debug):
        from zerodrift.train.tools.sample import SamplingOptions, TextGenerator

        if not math.isfinite(temperature):
            raise ConfigError("--temperature", "must be a finite number", got=temperature)

        with streams.progress(f"reading {run}"):
            sampler = TextGenerator(run)
        texts = sampler.continue_prompt(prompt, SamplingOptions(tokens, temperature, top, seed), chat)
        streams.emit(prompt if not chat else "")
        for text in texts:
            streams.emit(text)
        streams.emit("\n")
