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
    """Train a model as a job file says, with checkpoints, a report, and the exported model at the end.

    Resumes from the newest checkpoint in the run's folder, if there is one. Under torchrun or srun it joins
    the ranks that were started. Ctrl-C finishes the current step, saves, and exits with 130; a second Ctrl-C
    stops at once. --dry-run checks everything up to the first step and starts nothing.

    \b
    Examples:
      zerodrift train examples/jobs/lab.yaml --nproc 2
      zerodrift train job.yaml --dry-run
      zerodrift train job.yaml --nproc 2 --set run.steps=100 \\
        --set config.zero_optimization.stage=2
      torchrun --nproc-per-node=8 -m zerodrift train job.yaml
    """
    with streams.errors(debug):
        from zerodrift.train import dry_run
        from zerodrift.train import train as run

        if dry:
            dry_run(job, tuple(set_ or ()), nproc, plan)
        else:
            raise typer.Exit(run(job, tuple(set_ or ()), nproc, debug, plan))


def evaluate(
    job: options.Job, set_: options.SetInJob = None, nproc: options.Nproc = None, debug: options.Debug = False
) -> None:
    """Evaluate a checkpoint of a job on what it holds out, and train nothing.

    Prints the validation loss that training reports at the same checkpoint, its perplexity, and what the
    model writes after `run.samples`. It is the newest checkpoint, or the one that `run.resume` names;
    without one the model as it is before its first step. Other data to validate with can be named.

    \b
    Examples:
      zerodrift evaluate examples/jobs/lab.yaml
      zerodrift evaluate job.yaml --set run.resume=step-00000200
      zerodrift evaluate job.yaml --set data.validation=path/to/other/text
    """
    with streams.errors(debug):
        from zerodrift.train import evaluate as run

        raise typer.Exit(run(job, tuple(set_ or ()), nproc, debug))


def data(job: options.Job, set_: options.SetInJob = None, debug: options.Debug = False) -> None:
    """Show what a job is trained on, without training: files, documents and tokens, what was cut or left
    out and why, what is held out, and the first three blocks with what is learned marked.

    Blocks are packed as for training, which then finds them in the cache of the run's folder.

    \b
    Examples:
      zerodrift data examples/jobs/lab.yaml
      zerodrift data job.yaml --set data.train=chats.jsonl --set data.block=1024
    """
    with streams.errors(debug):
        from zerodrift.train import preview, read_job

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
    """Compute steps of a run once more, and say where bits first differ from what it recorded.

    The run must have been trained with `run.digest_every`. Under `precision.reduce: {order: tree}` the bits
    are the same on any number of processes, so steps of many can be replayed on one. Exit code 3: other
    bits.

    \b
    Examples:
      zerodrift replay runs/lab
      zerodrift replay runs/lab --from 20 --to 40 --nproc 1
    """
    with streams.errors(debug):
        from zerodrift.train import replay as again

        raise typer.Exit(again(run, first, last, nproc, debug))


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
    """Continue a prompt with a trained model, to see what it has learned.

    RUN is the folder of a run, its export, its checkpoints or one of them, from whatever working folder. Of
    a run that has not finished, its newest checkpoint is used.

    \b
    Examples:
      zerodrift sample runs/lab --prompt 'model:'
      zerodrift sample runs/chat --chat --prompt 'Who are you?' --temperature 0
    """
    with streams.errors(debug):
        from zerodrift.train import SamplingOptions, TextGenerator

        if not math.isfinite(temperature):
            raise ConfigError("--temperature", "must be a finite number", got=temperature)
        with streams.progress(f"reading {run}"):
            sampler = TextGenerator(run)
        texts = sampler.continue_prompt(prompt, SamplingOptions(tokens, temperature, top, seed), chat)
        streams.emit(prompt if not chat else "")
        for text in texts:
            streams.emit(text)
        streams.emit("\n")
