"""Open a DeepSpeed checkpoint by parameter name: weights, fp32 masters, moments, and the state of the run.

DeepSpeed's buffers are cut into parameters by name. At stages 1 and 2 a parameter group is one flat buffer,
cut into equal pieces, one per rank. At stage 3 every parameter is cut by itself. Stage 0 saves an optimizer's
state by its own numbers.

Invariants: every element of a parameter is in exactly one run, and nothing is copied before a run is used.
Lengths and, if they were saved, the weights agree with the place that a parameter is taken from, or there is
an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerodrift import optimizers
from zerodrift.checkpoint import SavedParameter
from zerodrift.errors import CheckpointError, ZerodriftError, said
from zerodrift.weights.deepspeed.files import DeepSpeedFiles, find_tag, is_tried, read_files
from zerodrift.weights.deepspeed.stage_0 import hold_by_number, hold_flat
from zerodrift.weights.sources import ConvertSource, Run, TrainingState, dtype_of

_WRITTEN = """
module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments
lr_scheduler data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples
dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version universal_checkpoint_info
ds_autoep_layers autoep_layers
"""
KNOWN = frozenset(_WRITTEN.split())
"""Keys that DeepSpeed itself writes; all others are the client's."""


GLANCE = 4096
"""Number of elements of each run that are compared with the model's weights."""
_OTHER_SAVE = "The files are of different saves, or of a DeepSpeed that lays them out in another way."


@dataclass(frozen=True, slots=True)
class DeepSpeedParameter:
    entry: SavedParameter
    weight: tuple[Run, ...]
    """fp32 masters, or the model's weights if there are none."""
    moments: Mapping[str, tuple[Run, ...]]


@dataclass(frozen=True, slots=True)
class StageContents:
    parameters: list[DeepSpeedParameter]
    groups: Sequence[Mapping[str, Any]]
    updates: int
    """Steps that the optimizer has counted."""
    scaler: Any
    notes: tuple[str, ...] = ()


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
        must = "must be laid out as DeepSpeed lays it out"
        do = "It is of a DeepSpeed that this was not tried with, or was written by another program."
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
        do = "Two saves are mixed: remove what the later did not write."
        raise CheckpointError(folder, must, got=updates, do=do)
    notes = list(contents.notes)
    if 0 < updates < done:
        notes.append(
            f"The optimizer has counted {updates} of {done} steps: it was made anew on the way, or the files "
            "are of two saves."
        )
    if not is_tried(files.version):
        notes.append(f"DeepSpeed {files.version} is newer than what this was tried with; the layout fits.")
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
    """Find the meaning of the moments: by their names, then by the weight decay in the config or groups."""
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


def _count_updates(
    bases: Iterable[Mapping[int, Mapping[str, Any]]], groups: Sequence[Mapping[str, Any]]
) -> int:
    counters = [*itertools.chain.from_iterable(base.values() for base in bases), *groups]
    return max((int(state["step"]) for state in counters if "step" in state), default=0)


def _parameter(
    names: Sequence[str], shape: Sequence[int], group: int, weight: Iterable[Run], **moments: Any
) -> DeepSpeedParameter:
    runs, kept = tuple(weight), {key: tuple(values) for key, values in moments.items()}
    dtype = dtype_of(runs[0][1].dtype if runs else torch.float32, "tensor").value
    entry = SavedParameter(tuple(names), tuple(shape), dtype, group, tuple(kept))
    return DeepSpeedParameter(entry, runs, kept)


def _names(model: Mapping[str, Any], name: str) -> list[str]:
    """Return the names of a parameter, its own first."""
    return [name, *(alias for alias, own in (model.get("shared_params") or {}).items() if own == name)]


def _flat_keys(state: Mapping[str, Any]) -> list[str]:
    """Return the keys of flat moments, without counters."""
    return [k for k, value in state.items() if isinstance(value, torch.Tensor) and value.dim() == 1]


def _does_not_fit(files: DeepSpeedFiles, what: str, wanted: int, have: int) -> CheckpointError:
    must = f"must hold {wanted:,} elements for {what}, as its shapes say"
    return CheckpointError(files.folder, must, got=f"{have:,}", do=_OTHER_SAVE)


def _whole(value: torch.Tensor) -> tuple[Run, ...]:
    return ((0, value.detach().reshape(-1)),) if value.numel() else ()


def _cut(pieces: Sequence[torch.Tensor], start: int, numel: int) -> Iterator[Run]:
    """Yield elements `[start, start + numel)` of pieces that follow each other."""
    begin = 0
    for piece in pieces:
        low, high = max(start, begin), min(start + numel, begin + piece.numel())
        if low < high:
            yield low - start, piece[low - begin : high - begin]
        begin += piece.numel()


def stage_1_or_2(files: DeepSpeedFiles) -> StageContents:
    model, states = files.models[0], [state["optimizer_state_dict"] for state in files.optimizers]
    module = model["module"]
    # An elastic checkpoint has a list of the groups' moments.
    bases = [state["base_optimizer_state"] for state in states]
    moments_of = [dict(enumerate(b)) if isinstance(b, list) else b.get("state", {}) for b in bases]
    for state in states:
        have = len(state["single_partition_of_fp32_groups"])
        if have != len(model["param_shapes"]):
            must = f"must hold masters of {len(model['param_shapes'])} parameter groups, as its shapes say"
            do = "The files are of different saves."
            raise CheckpointError(files.folder, must, got=have, do=do)
    parameters: list[DeepSpeedParameter] = []
    for group, shapes in enumerate(model["param_shapes"]):
        pieces = [state["single_partition_of_fp32_groups"][group] for state in states]
        moments: dict[str, list[torch.Tensor]] = {}
        for key in _flat_keys(moments_of[0].get(group, {})):
            flats = [of_rank[group][key] for of_rank in moments_of]
            pairs = list(zip(flats, (piece.numel() for piece in pieces), strict=True))
            if any(flat.numel() < length for flat, length in pairs):
                wanted, have = sum(length for _, length in pairs), sum(flat.numel() for flat in flats)
                raise _does_not_fit(files, f"moment {key}", wanted, have)
            moments[key] = [flat[:length] for flat, length in pairs]
        end = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            weight = tuple(_cut(pieces, end, numel))
            _check_values(files, name, module.get(name), weight)
            own = {key: _cut(flats, end, numel) for key, flats in moments.items()}
            parameters.append(_parameter(_names(model, name), shape, group, weight, **own))
            end += numel
        have = sum(piece.numel() for piece in pieces)
        if not end <= have < end + 2 * len(pieces):
            raise _does_not_fit(files, f"group {group}", end, have)
    frozen = dict(model.get("frozen_param_fragments") or {})
    known = {saved.entry.name for saved in parameters} | frozen.keys()
    known |= {alias for alias, name in (model.get("shared_params") or {}).items() if name in known}
    known |= set(model.get("buffer_names") or ())
    # Stage 1 saves frozen parameters only among the weights.
    frozen |= {name: value for name, value in module.items() if name not in known}
    for name, value in frozen.items():
        parameters.append(_parameter(_names(model, name), value.shape, -1, _whole(value)))
    groups = bases[0].get("param_groups", ()) if isinstance(bases[0], dict) else ()
    updates = _count_updates(moments_of, groups)
    return StageContents(parameters, groups, updates, states[0].get("loss_scaler"))


def _check_values(
    files: DeepSpeedFiles, name: str, weights: torch.Tensor | None, masters: Sequence[Run]
) -> None:
    """Compare some masters of each run with the weights: they differ if files of two saves are mixed, or if
    the parameters are in another order than the one assumed here."""
    if weights is None or not weights.is_floating_point():
        return
    for start, values in masters:
        step = -(-values.numel() // GLANCE)
        there = weights.reshape(-1)[start : start + values.numel() : step]
        mine = values[::step].to(weights.dtype)
        if not torch.equal(mine.nan_to_num(nan=0.5), there.nan_to_num(nan=0.5)):
            must = f"must have masters of `{name}` that round to its weights"
            got = f"others, among those from element {start} on"
            raise CheckpointError(files.folder, must, got=got, do=_OTHER_SAVE)


def stage_3(files: DeepSpeedFiles) -> StageContents:
    model, states = files.models[0], [state["optimizer_state_dict"] for state in files.optimizers]
    ranks, bases = len(states), [state["optimizer_state_dict"] for state in states]
    flats = [state["fp32_flat_groups"] for state in states]
    moments: dict[str, list[list[torch.Tensor]]] = {}
    """Key -> rank -> sub-group."""
    for rank, base in enumerate(bases):
        own = [base["state"].get(number, {}) for number in range(len(flats[rank]))]
        for key in _flat_keys(own[0]):
            moments.setdefault(key, []).append([state[key] for state in own])
    groups = bases[0]["param_groups"]
    group_of = {sub: group for group, options in enumerate(groups) for sub in options.get("params", ())}
    parameters, end = [], 0
    bounds = list(itertools.accumulate(flat.numel() for flat in flats[0])) or [0]
    """Ends of the sub-groups on rank 0."""
    for name, shape in [pair for part in model["param_shapes"] for pair in part.items()]:
        numel = math.prod(shape)
        share = -(-numel // ranks)
        sub = next((number for number, bound in enumerate(bounds) if end < bound), len(bounds) - 1)
        weight = _shares(flats, end, share, numel)
        kept = {key: _shares(values, end, share, numel) for key, values in moments.items()}
        parameters.append(_parameter(_names(model, name), shape, group_of.get(sub, 0), weight, **kept))
        end += share
    for rank, own_flats in enumerate(flats):
        have = sum(flat.numel() for flat in own_flats)
        if have != end:
            raise _does_not_fit(files, f"rank {rank}", end, have)
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        parts = [[state["frozen_param_fragments"][name]] for state in files.models]
        numel = math.prod(shape)
        runs = _shares(parts, 0, -(-numel // ranks), numel)
        parameters.append(_parameter(_names(model, name), shape, -1, runs))
    updates = _count_updates([base["state"] for base in bases], groups)
    return StageContents(parameters, groups, updates, states[0].get("loss_scaler"))


def _shares(flats: Sequence[Sequence[torch.Tensor]], start: int, share: int, numel: int) -> Iterator[Run]:
    """Yield a parameter that is cut into one piece of `share` elements per rank, the last ones shorter."""
    for rank, own in enumerate(flats):
        count = min(share, numel - rank * share)
        for begin, values in _cut(own, start, max(count, 0)):
            yield rank * share + begin, values


def stage_0(files: DeepSpeedFiles) -> StageContents:
    """Match the optimizer's numbers with parameters by shapes or values; if both leave a choice, masters and
    moments are left out with a note."""
    model = files.models[0]
    buffers = set(model.get("buffer_names") or ())
    names: dict[tuple[int, int, int], list[str]] = {}
    """Storage, offset and size -> names; tied parameters share memory."""
    for name, value in model["module"].items():
        if name not in buffers:
            place = (value.untyped_storage().data_ptr(), int(value.storage_offset()), value.numel())
            key = place if value.numel() else (-1, len(names), 0)
            names.setdefault(key, []).append(name)
    weights = {own[0]: model["module"][own[0]] for own in names.values()}
    saved = model.get("optimizer") or {}
    base = saved.get("optimizer_state_dict", saved)
    groups, state = base.get("param_groups", ()), base.get("state", {})
    if "fp32_groups_flat" in saved:
        held = hold_flat(weights, saved["fp32_groups_flat"], state.get(0, {}))
    else:
        held = hold_by_number(weights, groups, saved.get("fp32_groups"), state)
    parameters = []
    for own in names.values():
        value = weights[own[0]]
        # Without any state, all parameters count as trained.
        group, master, moments = held.get(own[0], (-1 if held else 0, value, {}))
        runs = {key: _whole(moment) for key, moment in moments.items()}
        parameters.append(_parameter(own, value.shape, group, _whole(master), **runs))
    note = (
        "Stage 0 saves the optimizer's state without names, and shapes do not tell its parameters apart: "
        "masters and moments were left out. Save once at stage 1 to keep them."
    )
    scaler = saved if "cur_scale" in saved else None
    notes = (note,) if groups and not held else ()
    return StageContents(parameters, groups, _count_updates([state], groups), scaler, notes)
