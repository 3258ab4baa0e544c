"""A DeepSpeed checkpoint by parameter name: weights, fp32 masters, moments, and where the run was.

Which files there must be is `files.py`'s business, how each ZeRO stage lays its buffers out that of
`sharded.py` and `unsharded.py`.

Invariant: every element of a parameter is in exactly one run, and nothing is read before a run is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerodrift.errors import CheckpointError, ZerodriftError, said
from zerodrift.io.deepspeed.files import DeepSpeedFiles, find_tag, is_tried, read_files
from zerodrift.io.deepspeed.parts import DeepSpeedParameter, Run
from zerodrift.io.deepspeed.sharded import stage_1_or_2, stage_3
from zerodrift.io.deepspeed.unsharded import stage_0

KNOWN = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "ds_autoep_layers",
        "autoep_layers",
    ]
)
"""What DeepSpeed itself writes beside the weights; the rest is the client's."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Where the run was."""

    step: int
    skipped: int
    updates: int
    """Steps that the optimizer counts; what Adam corrects its bias by."""
    samples: int


@dataclass(frozen=True, slots=True)
class Scale:
    """The loss scale, in the words of `engine.scale.Scaler`."""

    scale: float
    good: int
    """Steps since the last overflow."""
    left: int | None
    """Hysteresis left; None where it was not saved."""
    dynamic: bool


@dataclass(frozen=True, slots=True)
class DeepSpeedCheckpoint:
    """A checkpoint that DeepSpeed saved. Made by `open_deepspeed`."""

    folder: Path
    stage: int
    ranks: int
    version: str
    dtype: str
    """What the model computed in, by the config: `bf16`, `fp16` or `fp32`."""
    parameters: tuple[DeepSpeedParameter, ...]
    """In the order of the model."""
    buffers: Mapping[str, torch.Tensor]
    counters: Counters
    scale: Scale | None
    groups: tuple[Mapping[str, Any], ...]
    """Options of the optimizer's parameter groups."""
    schedule: Any
    """The state of the learning rate schedule, or None."""
    client: Mapping[str, Any]
    config: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())
    """What a person should know."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(saved.name for saved in self.parameters)

    def find(self, name: str) -> DeepSpeedParameter:
        parameter = next((p for p in self.parameters if name == p.name or name in p.aliases), None)
        if parameter is None:
            raise CheckpointError(self.folder, f"must hold the parameter {name!r}", got="none of the name")
        return parameter

    def weight(self, name: str) -> torch.Tensor:
        """In full: the fp32 master."""
        saved = self.find(name)
        return joined(saved.weight, saved.shape)

    def moment(self, name: str, key: str) -> torch.Tensor:
        """In full, by torch's name for it: `exp_avg`."""
        saved = self.find(name)
        if key not in saved.moments:
            have = ", ".join(saved.moments) or "none"
            raise CheckpointError(name, f"must have the moment {key!r} in the checkpoint", got=have)
        return joined(saved.moments[key], saved.shape)


def joined(runs: Sequence[Run], shape: tuple[int, ...]) -> torch.Tensor:
    """A parameter in full, in memory of its own."""
    if not runs:
        return torch.zeros(shape)
    return torch.cat([values for _, values in runs]).view(shape)


def open_deepspeed(path: Path, tag: str = "", trust: bool = False) -> DeepSpeedCheckpoint:
    """A DeepSpeed checkpoint: the folder of one, or the one that `latest` names, or of a `tag`."""
    folder = find_tag(path, tag)
    try:
        return _read(read_files(folder, trust))
    except ZerodriftError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            folder,
            "must be laid out as DeepSpeed lays it out",
            got=said(error),
            do="It is of a DeepSpeed that this was not tried with, or was written by another program.",
        ) from error


def _read(files: DeepSpeedFiles) -> DeepSpeedCheckpoint:
    model = files.models[0]
    if model.get("ds_autoep_layers") or model.get("autoep_layers"):
        raise CheckpointError(files.folder, "must be without expert parallelism", got="AutoEP layers")
    module: Mapping[str, torch.Tensor] = model["module"]
    if not files.optimizers:
        read = stage_0(files)
    elif stage_of(files) <= 2:
        read = stage_1_or_2(files)
    else:
        read = stage_3(files)
    done = int(model.get("global_steps") or 0) - int(model.get("skipped_steps") or 0)
    if read.updates > done + 1:  # some versions count a step of zeros when the optimizer is made
        raise CheckpointError(
            files.folder,
            f"must have an optimizer of at most {done} steps, as its model files say",
            got=read.updates,
            do="Two saves are mixed: remove what the later did not write.",
        )
    buffers = {name: module[name] for name in model.get("buffer_names") or () if name in module}
    notes = list(read.notes)
    if 0 < read.updates < done:
        notes.append(
            f"The optimizer has counted {read.updates} of {done} steps: it was made anew on the way, or the "
            f"files are of two saves."
        )
    if not is_tried(files.version):
        notes.append(f"DeepSpeed {files.version} is newer than what this was tried with; the layout fits.")
    return DeepSpeedCheckpoint(
        folder=files.folder,
        stage=stage_of(files) if files.optimizers else 0,
        ranks=len(files.optimizers) or int(model.get("dp_world_size") or 1),
        version=files.version,
        dtype=_dtype(model.get("ds_config") or {}),
        parameters=tuple(_ordered(read.parameters, module)),
        buffers=buffers,
        counters=Counters(
            int(model.get("global_steps") or 0),
            int(model.get("skipped_steps") or 0),
            read.updates,
            int(model.get("global_samples") or 0),
        ),
        scale=_scale(read.scaler),
        groups=tuple({k: v for k, v in group.items() if k != "params"} for group in read.groups),
        schedule=model.get("lr_scheduler"),
        client={key: value for key, value in model.items() if key not in KNOWN},
        config=model.get("ds_config") or {},
        notes=tuple(notes),
    )


def stage_of(files: DeepSpeedFiles) -> int:
    stage = files.optimizers[0]["optimizer_state_dict"].get("zero_stage")
    number = getattr(stage, "values", (stage,))[0]
    if number not in (1, 2, 3):
        raise CheckpointError(files.folder, "must be of ZeRO stage 1, 2 or 3", got=repr(number))
    return int(number)


def _scale(scaler: Any) -> Scale | None:
    if scaler is None:
        return None
    values = scaler if isinstance(scaler, dict) else vars(scaler)
    dynamic = "scale_window" in values
    if not dynamic and float(values.get("cur_scale", 1.0)) == 1.0:
        return None
    count, last = int(values.get("cur_iter", 0)), int(values.get("last_overflow_iter", -1))
    left = values.get("cur_hysteresis")
    return Scale(float(values["cur_scale"]), count - last - 1, None if left is None else int(left), dynamic)


def _dtype(config: Mapping[str, Any]) -> str:
    for key, name in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if (config.get(key) or {}).get("enabled"):
            return name
    return "fp32"


def _ordered(parameters: Sequence[DeepSpeedParameter], module: Mapping[str, Any]) -> list[DeepSpeedParameter]:
    """In the order of the model's own state dict, which optimizer groups shuffle."""
    place = {name: number for number, name in enumerate(module)}
    return sorted(parameters, key=lambda saved: place.get(saved.name, len(place)))
