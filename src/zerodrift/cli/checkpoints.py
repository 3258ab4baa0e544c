"""Read checkpoints and convert weights: `inspect`, `convert`.

Invariant: the source is left as it is.
"""

from __future__ import annotations

from typing import Any, cast

import typer

from zerodrift.cli import options, streams
from zerodrift.errors import ConfigError


def inspect(
    checkpoint: options.Checkpoint,
    verify: options.Verify = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what is in a checkpoint: step, plan, tensors, sizes, and whether it is complete.

    Exits with code 2 if it is not complete.

    \b
    Examples:
      zerodrift inspect runs/lab
      zerodrift inspect runs/lab/checkpoints/step-00000020 --verify
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

    --merge makes one model of trained adapters and their base, in the base's dtype or in --dtype.

    \b
    Examples:
      zerodrift convert runs/lab exported --model examples/qwen3-moe-tiny
      zerodrift convert runs/a merged --merge         # a run with model.lora
      zerodrift convert ds_run converted              # to continue training
      zerodrift convert ds_run exported --to safetensors --model path/to/model
      zerodrift convert path/to/model start --to checkpoint
    """
    with streams.errors(debug):
        if to not in (None, "safetensors", "checkpoint"):
            raise ConfigError("--to", "must be safetensors or checkpoint", got=repr(to))
        if merge:
            refused = {"--to": to == "checkpoint", "--trust": trust, "--optimizer": optimizer}
            if option := next((option for option, given in refused.items() if given), ""):
                raise ConfigError(option, "must be left out with `--merge`, which writes safetensors")
        from zerodrift.weights import ConvertOptions
        from zerodrift.weights import convert as run

        chosen = ConvertOptions(cast(Any, to), dtype, max_shard_size, overwrite, tag, trust, optimizer)
        if merge:
            from zerodrift.train import merge as run_merge

            with streams.progress(f"merging {source}"):
                done = run_merge(source, target, chosen, model)
            streams.emit(str(done))
            return
        from zerodrift.train import checkpoints_at, config_of

        model = model or config_of(source)
        streams.emit(str(run(checkpoints_at(source), target, chosen, model, shown=True)))
