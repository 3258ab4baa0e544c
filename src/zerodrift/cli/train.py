"""Run the reference trainer, and read and convert what it writes: `train`, `evaluate`, `data`, `replay`,
`sample`, `inspect`, `convert`.

Invariant: the exit code is that of the trainer, and no command changes a checkpoint that it reads.
"""

from __future__ import annotations

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
    """Train the model of a job file; write checkpoints, a report, and the exported model.

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
    """Evaluate a checkpoint on the held-out data of its job, without training.

    Prints the validation loss that training reports at this checkpoint, its perplexity, and the
    continuations of `run.samples`. The checkpoint is the newest, or the one that `run.resume` names. Without
    a checkpoint the untrained model is evaluated. `data.validation` may name other data.

    \b
    Examples:
      zerodrift evaluate examples/jobs/lab.yaml
      zerodrift evaluate job.yaml \\
        --set run.resume=step-00000200
      zerodrift evaluate job.yaml \\
        --set data.validation=path/to/other/text
    """
    with streams.errors(debug):
        from zerodrift.train import evaluate as run

        raise typer.Exit(run(job, tuple(set_ or ()), nproc, debug))


def data(job: options.Job, set_: options.SetInJob = None, debug: options.Debug = False) -> None:
    """Show the data of a job: files, documents, tokens, held-out documents, and the first three blocks with
    the learned text marked. Says what was cut or left out, and why.

    Blocks are packed as for training, which then reads them from the cache.

    \b
    Examples:
      zerodrift data examples/jobs/lab.yaml
      zerodrift data job.yaml --set data.train=chats.jsonl \\
        --set data.block=1024
    """
    with streams.errors(debug):
        from zerodrift.train import preview, read_job

        with streams.progress(f"reading the data of {job}"):
            read, _ = read_job(job, tuple(set_ or ()))
            text = preview(read, **streams.layout())
        streams.emit(text)


def replay(
    run: options.Run,
    first: options.FirstStep = None,
    last: options.LastStep = None,
    nproc: options.ReplayNproc = None,
    debug: options.Debug = False,
) -> None:
    """Compute steps of a run again, and show where their bits first differ from the recorded ones.

    The run must have been trained with `run.digest_every`. Under `precision.reduce: {order: tree}` bits do
    not depend on the number of processes, so one process can replay steps of many. Exit code 3: bits differ.

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

    RUN is the folder of a run, an export, or a checkpoint. A run without an export is sampled from its newest
    checkpoint.

    \b
    Examples:
      zerodrift sample runs/lab --prompt 'model:'
      zerodrift sample runs/chat --chat --temperature 0 \\
        --prompt 'Who are you?'
    """
    with streams.errors(debug):
        from zerodrift.train import TextGenerator, chooser

        with streams.progress(f"reading {run}"):
            sampler = TextGenerator(run)
        texts = sampler.continue_prompt(prompt, tokens, chooser(temperature, top, seed), chat)
        streams.emit(prompt if not chat else "")
        for text in texts:
            streams.emit(text)
        streams.emit("\n")


def inspect(
    checkpoint: options.Checkpoint,
    verify: options.Verify = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show a checkpoint: step, plan, tensors, sizes, and whether it is complete.

    Exit code 2: it is not complete.

    \b
    Examples:
      zerodrift inspect runs/lab
      zerodrift inspect runs/lab/checkpoints/step-00000020 \\
        --verify
      zerodrift inspect runs/lab/export
    """
    with streams.errors(debug):
        from zerodrift.checkpoint import inspect as read
        from zerodrift.checkpoint import inspection_json, inspection_text
        from zerodrift.train import checkpoints_at

        with streams.progress(f"reading {checkpoint}"):
            inspection = read(checkpoints_at(checkpoint), verify=verify)
        text = inspection_json(inspection) if json else inspection_text(inspection, **streams.layout())
        streams.emit(text)
        if not inspection.complete:
            raise typer.Exit(streams.USAGE)


def convert(
    source: options.Source,
    target: options.Target,
    to: options.To = None,
    model: options.WeightsModel = None,
    dtype: options.Dtype = None,
    max_shard_size: options.MaxShardSize = "5GB",
    tag: options.Tag = "",
    optimizer: options.Moments = "",
    overwrite: options.Overwrite = False,
    trust: options.Trust = False,
    merge: options.Merge = False,
    debug: options.Debug = False,
) -> None:
    """Convert weights, together with masters, moments and counters where both formats have them.

    The kind of SOURCE is detected and printed. One process converts a few megabytes at a time. With --model,
    safetensors files get the names, layout and config that transformers loads; without it they keep the
    module's own names.

    --merge merges trained adapters into their base, in the base's dtype or in --dtype.

    \b
    Examples:
      zerodrift convert runs/lab exported \\
        --model examples/qwen3-moe-tiny
      zerodrift convert runs/a merged --merge  # model.lora
      zerodrift convert ds_run converted  # to train on
      zerodrift convert ds_run exported --to safetensors \\
        --model path/to/model
      zerodrift convert path/to/model start --to checkpoint
    """
    with streams.errors(debug):
        if merge:
            refused = {"--to": to == "checkpoint", "--trust": trust, "--optimizer": optimizer}
            if option := next((option for option, given in refused.items() if given), ""):
                raise ConfigError(option, "must be left out with `--merge`, which writes safetensors")
        from zerodrift.weights import ConvertOptions
        from zerodrift.weights import convert as run

        chosen = ConvertOptions(to, dtype, max_shard_size, overwrite, tag, trust, optimizer)
        if merge:
            from zerodrift.train import merge as run_merge

            with streams.progress(f"merging {source}"):
                done = run_merge(source, target, chosen, model)
            streams.emit(str(done))
            return
        from zerodrift.train import checkpoints_at, config_of

        model = model or config_of(source)
        streams.emit(str(run(checkpoints_at(source), target, chosen, model, shown=True)))
