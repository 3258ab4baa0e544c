"""Open a DeepSpeed checkpoint by parameter name: weights, fp32 masters, moments, and the state of the run.

`files` reads the files of a tag, and `stages` cuts their buffers into parameters. This file reads the rest:
optimizer, counts of steps, loss scale, schedule and client state.

Invariant: everything that had to be guessed or left out is named in a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zerodrift import optimizers
from zerodrift.errors import CheckpointError, ZerodriftError, said
from zerodrift.weights.deepspeed.files import DeepSpeedFiles, find_tag, is_tried, read_files
from zerodrift.weights.deepspeed.stages import StageContents, stage_0, stage_1_or_2, stage_3
from zerodrift.weights.sources import ConvertSource, TrainingState

_WRITTEN = """
module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments
lr_scheduler data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples
dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version universal_checkpoint_info
ds_autoep_layers autoep_layers
"""
KNOWN = frozenset(_WRITTEN.split())
"""Keys that DeepSpeed itself writes; all others are the client's."""


def open_deepspeed(path: Path, tag: str = "", trust: bool = False, optimizer: str = "") -> ConvertSource:
    """Open the checkpoint in a folder, or of a `tag` in it, by default the one that `latest` names.

    `optimizer` overrides the meaning of the moments.
    """
    folder = find_tag(path, tag)
    try:
        return _read(read_files(folder, trust), optimizer)
    except ZerodriftError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        must = "must have DeepSpeed's layout"
        do = "It was saved by an untested version of DeepSpeed, or by another program."
        raise CheckpointError(folder, must, got=said(error), do=do) from error


def _read(files: DeepSpeedFiles, optimizer: str) -> ConvertSource:
    folder, model = files.folder, files.models[0]
    if model.get("ds_autoep_layers") or model.get("autoep_layers"):
        raise CheckpointError(folder, "must be without expert parallelism", got="AutoEP layers")
    module: Mapping[str, torch.Tensor] = model["module"]
    config = model.get("ds_config") or {}
    stage = _stage(files)
    contents = (stage_0, stage_1_or_2, stage_1_or_2, stage_3)[stage](files)
    step, skipped = int(model.get("global_steps") or 0), int(model.get("skipped_steps") or 0)
    done, updates = step - skipped, contents.updates
    if updates > done + 1:  # some versions count a step of zeros when the optimizer is made
        must = f"must have an optimizer of at most {done} steps, as its model files say"
        do = "Two saves are mixed: remove the files of the older one."
        raise CheckpointError(folder, must, got=updates, do=do)
    notes = list(contents.notes)
    if 0 < updates < done:
        notes.append(
            f"The optimizer has counted {updates} of {done} steps: it was made after the run began, or "
            "the files are of two saves."
        )
    if not is_tried(files.version):
        notes.append(f"DeepSpeed {files.version} is newer than the tested versions; its layout fits.")
    modes = (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"))
    mode = next((name for key, name in modes if (config.get(key) or {}).get("enabled")), "fp32")
    place = {name: number for number, name in enumerate(module)}  # optimizer groups have another order
    parameters = sorted(contents.parameters, key=lambda p: place.get(p.entry.name, len(place)))
    by_name = {parameter.entry.name: parameter for parameter in parameters}
    entries = tuple(parameter.entry for parameter in parameters)
    groups = tuple({k: v for k, v in group.items() if k != "params"} for group in contents.groups)
    kind = _find_optimizer(optimizer, contents, config, groups, notes)
    # DeepSpeed's schedules and torch's have the same names and states here.
    state = model.get("lr_scheduler")
    schedule = str((config.get("scheduler") or {}).get("type") or "") if isinstance(state, Mapping) else ""
    if state is not None and not schedule:
        notes.append("The learning rate schedule is not of the config: its state was left out.")
    trained = TrainingState(
        step=step,
        skipped=skipped,
        optimizer=kind,
        updates=updates,
        groups=groups or tuple({} for _ in range(1 + max((entry.group for entry in entries), default=0))),
        scaler=_scaler(contents.scaler, config) if mode == "fp16" else None,
        schedule=schedule,
        schedule_state=dict(state) if isinstance(state, Mapping) else None,
        mode=mode,
        stage=stage,
        ranks=len(files.optimizers) or int(model.get("dp_world_size") or 1),
        client={key: value for key, value in model.items() if key not in KNOWN},
        samples=int(model.get("global_samples") or 0),
    )
    where = f"stage {stage}, {trained.ranks} ranks, {mode}, step {step}"
    return ConvertSource(
        f"a DeepSpeed {files.version} checkpoint of {where}",
        folder,
        entries,
        {name: module[name] for name in model.get("buffer_names") or () if name in module},
        lambda entry: iter(by_name[entry.name].weight),
        lambda entry, key: iter(by_name[entry.name].moments[key]),
        trained,
        notes=tuple(notes),
    )


def _stage(files: DeepSpeedFiles) -> int:
    if not files.optimizers:
        return 0
    stage = files.optimizers[0]["optimizer_state_dict"].get("zero_stage")
    number = getattr(stage, "values", (stage,))[0]
    if number not in (1, 2, 3):
        raise CheckpointError(files.folder, "must be of ZeRO stage 1, 2 or 3", got=repr(number))
    return int(number)


def _scaler(scaler: Any, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of a loss scaler in the words of `engine.scale.Scaler`."""
    if scaler is None:
        return None
    values = scaler if isinstance(scaler, dict) else vars(scaler)
    if "scale_window" not in values and float(values.get("cur_scale", 1.0)) == 1.0:
        return None
    left = values.get("cur_hysteresis")
    if left is None:
        left = (config.get("fp16") or {}).get("hysteresis", 2)
    good = int(values.get("cur_iter", 0)) - int(values.get("last_overflow_iter", -1)) - 1
    return {"scale": float(values["cur_scale"]), "left": int(left), "good": good}


def _find_optimizer(
    given: str,
    contents: StageContents,
    config: Mapping[str, Any],
    groups: tuple[Mapping[str, Any], ...],
    notes: list[str],
) -> str:
    """Return the optimizer's name, by the names of the moments or the weight decay in config or groups."""
    keys = {key for parameter in contents.parameters for key in parameter.moments}
    if given or not keys:
        return given.lower() if keys else ""
    possible = optimizers.with_moments(keys)
    if len(possible) == 1:
        return possible[0].kind
    block = config.get("optimizer") or {}
    if block:
        is_adam = str(block.get("type", "")).lower() == "adam"
        return "adam" if is_adam and (block.get("params") or {}).get("adam_w_mode") is False else "adamw"
    flags = {group.get("decoupled_weight_decay") for group in groups}
    if flags <= {True} or flags <= {False}:
        return "adamw" if flags == {True} else "adam"
    notes.append(
        "The optimizer's class was not saved: its moments are taken for AdamW's. Say `--optimizer adam` if "
        "it was Adam with L2 decay."
    )
    return "adamw"
