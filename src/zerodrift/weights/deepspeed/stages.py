"""Cut the buffers of each ZeRO stage into parameters by name: weights, fp32 masters and moments.

At stages 1 and 2 a parameter group is one flat buffer, cut into equal pieces, one per rank. At stage 3 every
parameter is cut by itself. Stage 0 saves an optimizer's state by numbers, which are matched with parameters
by shapes or values.

Invariants: every element of a parameter is in exactly one run, and nothing is copied before a run is used.
Lengths agree with the shapes, and masters with the model's weights if those were saved; anything else is an
error. At stage 0 a parameter gets a state only if there is one way to assign it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerodrift.checkpoint import SavedParameter
from zerodrift.errors import CheckpointError
from zerodrift.weights.deepspeed.files import DeepSpeedFiles
from zerodrift.weights.sources import Run, dtype_of

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


def _count_updates(
    bases: Iterable[Mapping[int, Mapping[str, Any]]], groups: Sequence[Mapping[str, Any]]
) -> int:
    counters = [*itertools.chain.from_iterable(base.values() for base in bases), *groups]
    return max((int(state["step"]) for state in counters if "step" in state), default=0)


def _parameter(
    files: DeepSpeedFiles,
    names: Sequence[str],
    shape: Sequence[int],
    group: int,
    weight: Iterable[Run],
    **moments: Iterable[Run],
) -> DeepSpeedParameter:
    runs, kept = tuple(weight), {key: tuple(values) for key, values in moments.items()}
    wanted = math.prod(shape)
    for key, found in (("weight", runs), *kept.items()):
        have = sum(values.numel() for _, values in found)
        if have != wanted:
            raise _does_not_fit(files, f"{key} of `{names[0]}`", wanted, have)
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
            moments[key] = [flat[: piece.numel()] for flat, piece in zip(flats, pieces, strict=True)]
        end = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            weight = tuple(_cut(pieces, end, numel))
            _check_values(files, name, module.get(name), weight)
            own = {key: _cut(flats, end, numel) for key, flats in moments.items()}
            parameters.append(_parameter(files, _names(model, name), shape, group, weight, **own))
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
        parameters.append(_parameter(files, _names(model, name), value.shape, -1, _whole(value)))
    groups = bases[0].get("param_groups", ()) if isinstance(bases[0], dict) else ()
    updates = _count_updates(moments_of, groups)
    return StageContents(parameters, groups, updates, states[0].get("loss_scaler"))


def _check_values(
    files: DeepSpeedFiles, name: str, weights: torch.Tensor | None, masters: Sequence[Run]
) -> None:
    """Compare some masters of each run with the weights. The weights differ if files of two saves are
    mixed, or if the parameters have another order than the one assumed here."""
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
            pairs = zip(own, flats[rank], strict=True)
            moments.setdefault(key, []).append([state[key][: flat.numel()] for state, flat in pairs])
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
        parameters.append(_parameter(files, _names(model, name), shape, group_of.get(sub, 0), weight, **kept))
        end += share
    for rank, own_flats in enumerate(flats):
        have = sum(flat.numel() for flat in own_flats)
        if have != end:
            raise _does_not_fit(files, f"rank {rank}", end, have)
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        parts = [[state["frozen_param_fragments"][name]] for state in files.models]
        numel = math.prod(shape)
        runs = _shares(parts, 0, -(-numel // ranks), numel)
        parameters.append(_parameter(files, _names(model, name), shape, -1, runs))
    updates = _count_updates([base["state"] for base in bases], groups)
    return StageContents(parameters, groups, updates, states[0].get("loss_scaler"))


def _shares(flats: Sequence[Sequence[torch.Tensor]], start: int, share: int, numel: int) -> Iterator[Run]:
    """Yield a parameter that is cut into one piece of `share` elements per rank, the last ones shorter."""
    for rank, own in enumerate(flats):
        count = min(share, numel - rank * share)
        for begin, values in _cut(own, start, max(count, 0)):
            yield rank * share + begin, values


def stage_0(files: DeepSpeedFiles) -> StageContents:
    """Match the optimizer's numbers with parameters by shapes or values. If both are ambiguous, leave out
    masters and moments, with a note."""
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
        parameters.append(_parameter(files, own, value.shape, group, _whole(master), **runs))
    note = (
        "Stage 0 saves the optimizer's state without names, and shapes do not tell its parameters apart: "
        "masters and moments were left out. Save once at stage 1 to keep them."
    )
    scaler = saved if "cur_scale" in saved else None
    notes = (note,) if groups and not held else ()
    return StageContents(parameters, groups, _count_updates([state], groups), scaler, notes)


Held = dict[str, tuple[int, torch.Tensor, dict[str, torch.Tensor]]]
"""Name -> (group, fp32 master or weight, moments)."""


def hold_flat(
    weights: Mapping[str, torch.Tensor], masters: Sequence[torch.Tensor], state: Mapping[str, Any]
) -> Held:
    """Cut the flat buffer of the only group, in the order of the model. Several groups are not assigned."""
    sizes = [value.numel() for value in weights.values()]
    if [master.numel() for master in masters] != [sum(sizes)]:
        return {}
    flats = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.numel() == sum(sizes)}
    moments = {key: flat.split(sizes) for key, flat in flats.items()}
    pieces = zip(weights, masters[0].split(sizes), strict=True)
    return {
        name: (0, master, {key: parts[number] for key, parts in moments.items()})
        for number, (name, master) in enumerate(pieces)
    }


def hold_by_number(
    weights: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    masters: Sequence[Sequence[torch.Tensor]] | None,
    state: Mapping[int, Mapping[str, Any]],
) -> Held:
    """Assign the state of an optimizer. Return {} if both shapes and values are ambiguous."""
    moments = {
        number: {k: value for k, value in own.items() if isinstance(value, torch.Tensor) and k != "step"}
        for number, own in state.items()
    }
    names = _names_by_shape(weights, groups, moments) or _names_by_value(weights, groups, masters or ())
    held: Held = {}
    for group, options in enumerate(groups):
        for place, number in enumerate(options["params"]):
            if number in names:
                name = names[number]
                master = masters[group][place] if masters else weights[name]
                held[name] = (group, master, moments.get(number, {}))
    return held


def _names_by_shape(
    weights: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    moments: Mapping[int, Mapping[str, torch.Tensor]],
) -> dict[int, str]:
    """Return the name of each number, or {} if there is a choice.

    A group has its parameters in the order of the model. If the group holds all parameters of its shapes,
    there is one way to assign them.
    """
    names: dict[int, str] = {}
    for options in groups:
        found = [{moment.shape for moment in moments.get(k, {}).values()} for k in options["params"]]
        shapes = [shape for own in found for shape in own]
        fitting = [name for name, value in weights.items() if value.shape in shapes]
        if any(len(own) != 1 for own in found) or [weights[name].shape for name in fitting] != shapes:
            return {}
        names |= zip(options["params"], fitting, strict=True)
    return names if len(set(names.values())) == len(names) else {}


def _names_by_value(
    weights: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    masters: Sequence[Sequence[torch.Tensor]],
) -> dict[int, str]:
    """Return the name of each number, or {} unless every master rounds to exactly one parameter."""
    names: dict[int, str] = {}
    for options, own in zip(groups, masters, strict=True) if masters else ():
        for number, master in zip(options["params"], own, strict=True):
            fitting = [
                name
                for name, value in weights.items()
                if master.shape == value.shape and torch.equal(master.to(value.dtype), value)
            ]
            if len(fitting) != 1:
                return {}
            names[number] = fitting[0]
    return names
