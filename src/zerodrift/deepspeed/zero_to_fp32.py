"""`deepspeed.utils.zero_to_fp32`: the master weights of a checkpoint in fp32, without an engine or ranks.

Checkpoints of zerodrift and of DeepSpeed can be read.

Invariant: names and shapes are those of the model's parameters. Tied parameters have all their names.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from torch import nn

from zerodrift.checkpoint import LATEST, CheckpointFolder, is_deepspeed, new_file, writing
from zerodrift.deepspeed.checkpointed_engine import as_path, require, without_ties, write_state
from zerodrift.deepspeed.parameters.values import engine_parameter
from zerodrift.weights import open_deepspeed, open_zerodrift, size_in_bytes

StateDict = dict[str, torch.Tensor]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> StateDict:
    """Return all parameters in fp32, and the buffers as they were saved. `lazy_mode` has no effect."""
    folder = as_path("checkpoint_dir", checkpoint_dir)
    if is_deepspeed(folder if tag is None else folder / tag) or is_deepspeed(folder):
        source = open_deepspeed(folder, tag or "")
    else:
        source = open_zerodrift(require(CheckpointFolder(folder), tag or LATEST))
    state: StateDict = {}
    for entry in source.entries:
        if entry.group >= 0 or not exclude_frozen_parameters:
            state |= dict.fromkeys(entry.names, source.whole(entry).float())
    return state | dict(source.buffers)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the parameters to `pytorch_model.bin` or `model.safetensors`. A model larger than
    `max_shard_size` goes to several files with an index."""
    folder = as_path("output_dir", output_dir)
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    state = without_ties(state) if safe_serialization else state
    shards = _shards(state, None if max_shard_size is None else size_in_bytes(max_shard_size))
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        place = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = f"{stem}{place}.{ending}"
        files |= dict.fromkeys(shard, name)
        with new_file(folder / name) as partial:
            write_state(shard, partial, safe_serialization)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(value.nbytes for value in state.values())},
            "weight_map": files,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        with writing(folder):
            (folder / f"{stem}.{ending}.index.json").write_text(text)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the parameters into a model and return it. In an engine's model they replace the master weights.
    Any other model is moved to the CPU."""
    if not any(engine_parameter(parameter) for parameter in model.parameters()):
        model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _shards(state: StateDict, limit: int | None) -> list[StateDict]:
    """Split a state dict in order, so that each shard is as full as the limit allows."""
    shards: list[StateDict] = [{}]
    filled = 0
    for name, value in state.items():
        if limit is not None and shards[-1] and filled + value.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = value
        filled += value.nbytes
    return shards


def main(arguments: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description="One fp32 model of a checkpoint.")
    add = parser.add_argument
    add("checkpoint_dir", help="the folder that holds `latest`")
    add("output_dir", help="the folder for the model")
    add("--max_shard_size", default="5GB", help="split into files no larger than this")
    add("--safe_serialization", action="store_true", help="write safetensors")
    add("-t", "--tag", default=None, help="the checkpoint; `latest` by default")
    add("--exclude_frozen_parameters", action="store_true", help="trained parameters only")
    add("-d", "--debug", action="store_true", help="accepted, without effect")
    given = vars(parser.parse_args(arguments))
    del given["debug"]
    convert_zero_checkpoint_to_fp32_state_dict(**given)


if __name__ == "__main__":
    main()
