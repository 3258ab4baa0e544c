"""`deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint, without an engine and without ranks.

Reads checkpoints that zerodrift saved, and those that DeepSpeed saved. The weights are the masters, exact.

Invariant: names, shapes and order are those of the model's parameters, tied ones under every name.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.checkpoint import state as states
from zerodrift.checkpoint.atomic import new_file
from zerodrift.checkpoint.folder import LATEST, CheckpointFolder, is_deepspeed
from zerodrift.checkpoint.manifest import SHARED, read_entries, verified
from zerodrift.checkpoint.paths import writing
from zerodrift.checkpoint.tensors import CheckpointReader
from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.checkpoints import require
from zerodrift.deepspeed.consolidated import write
from zerodrift.deepspeed.parameters import engine_parameter
from zerodrift.weights.deepspeed.checkpoint import open_deepspeed
from zerodrift.weights.writer import size_in_bytes

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "main",
]

__getattr__ = unsupported.lookup(__name__)

StateDict = dict[str, torch.Tensor]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> StateDict:
    """All parameters in fp32, and the buffers as they were saved. `lazy_mode` changes nothing: tensors are
    plain, and `contiguous()` of them is free."""
    folder = Path(checkpoint_dir)
    if is_deepspeed(folder if tag is None else folder / tag) or is_deepspeed(folder):
        return _of_deepspeed(folder, tag or "", exclude_frozen_parameters)
    checkpoint = require(CheckpointFolder(folder), tag or LATEST)
    verified(checkpoint)
    reader = CheckpointReader(checkpoint)
    state: StateDict = {}
    for entry in read_entries(checkpoint):
        if exclude_frozen_parameters and entry.group < 0:
            continue
        value = reader.weight(entry).float()
        state |= dict.fromkeys(entry.names, value)
    return state | states.read_state(checkpoint, SHARED)["buffers"]


def _of_deepspeed(folder: Path, tag: str, without_frozen: bool) -> StateDict:
    source = open_deepspeed(folder, tag)
    state: StateDict = {}
    for entry in source.entries:
        if not (without_frozen and entry.group < 0):
            state |= dict.fromkeys(entry.names, source.whole(entry.name).float())
    return state | dict(source.buffers)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write them: `pytorch_model.bin`, or `model.safetensors`, in several files with an index where one would
    be larger than `max_shard_size`."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    unique = _untied(state) if safe_serialization else state
    shards = _shards(unique, None if max_shard_size is None else size_in_bytes(max_shard_size))
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    folder = Path(output_dir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    homes: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        place = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = f"{stem}{place}.{ending}"
        homes |= dict.fromkeys(shard, name)
        with new_file(folder / name) as partial:
            write(shard, partial, safe_serialization)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_size, unique.values()))}, "weight_map": homes}
        with writing(folder):
            (folder / f"{stem}.{ending}.index.json").write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n"
            )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load them into a model, which it returns: on the CPU, or into the masters of an engine that runs it."""
    if not any(engine_parameter(parameter) for parameter in model.parameters()):
        model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _untied(state: StateDict) -> StateDict:
    """One name for each tensor: safetensors holds no tensor twice."""
    seen: set[int] = set()
    untied = {}
    for name, value in state.items():
        if id(value) not in seen:
            untied[name] = value.contiguous()
        seen.add(id(value))
    return untied


def _shards(state: StateDict, limit: int | None) -> list[StateDict]:
    """In order, each as full as the limit admits."""
    shards: list[StateDict] = [{}]
    filled = 0
    for name, value in state.items():
        if limit is not None and shards[-1] and filled + _size(value) > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = value
        filled += _size(value)
    return shards


def _size(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def main(arguments: list[str] | None = None) -> Any:
    """The command line of `zero_to_fp32.py`."""
    parser = argparse.ArgumentParser(description="One fp32 model of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder that holds `latest`")
    parser.add_argument("output_dir", help="where the model is written")
    parser.add_argument("--max_shard_size", default="5GB", help="split into files no larger than this")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint; `latest` by default")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="trained parameters alone")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; there is nothing more to say")
    given = parser.parse_args(arguments)
    convert_zero_checkpoint_to_fp32_state_dict(
        given.checkpoint_dir,
        given.output_dir,
        given.max_shard_size,
        given.safe_serialization,
        given.tag,
        given.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
