"""Cut DeepSpeed's buffers into parameters by name, for each ZeRO stage.

At stages 1 and 2 a parameter group is one flat buffer, cut into equal pieces, one per rank. At stage 3 every
parameter is cut by itself. Stage 0 gives its weights alone.

Invariant: every element of a parameter is in exactly one run; lengths and, if they were saved, the weights
agree with the place that a parameter is taken from, or there is an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerodrift.errors import CheckpointError
from zerodrift.weights.deepspeed.files import DeepSpeedFiles
from zerodrift.weights.sources import Run

GLANCE = 4096
"""Number of elements of each run that are compared with the model's weights."""
_OTHER_SAVE = "The files are of different saves, or of a DeepSpeed that lays them out in another way."


@dataclass(frozen=True, slots=True)
class DeepSpeedParameter:
    """One parameter of the checkpoint."""

    name: str
    aliases: tuple[str, ...]
    """Other names, if it is tied."""
    shape: tuple[int, ...]
    group: int
    """The optimizer's parameter group; -1 for none."""
    weight: tuple[Run, ...]
    """fp32 masters, or the model's weights if there are none."""
    moments: Mapping[str, tuple[Run, ...]]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight[0][1].dtype if self.weight else torch.float32


@dataclass(frozen=True, slots=True)
class StageContents:
    """The contents of a checkpoint of any stage."""

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
    model: Mapping[str, Any],
    name: str,
    shape: Sequence[int],
    group: int,
    weight: Iterable[Run],
    **moments: Any,
) -> DeepSpeedParameter:
    runs = {key: tuple(values) for key, values in moments.items()}
    aliases = tuple(alias for alias, own in (model.get("shared_params") or {}).items() if own == name)
    return DeepSpeedParameter(name, aliases, tuple(shape), group, tuple(weight), runs)


def _flat_keys(state: Mapping[str, Any]) -> list[str]:
    """Return the keys of flat moments, without counters."""
    return [k for k, value in state.items() if isinstance(value, torch.Tensor) and value.dim() == 1]


def _does_not_fit(files: DeepSpeedFiles, what: str, wanted: int, have: int) -> CheckpointError:
    must = f"must hold {wanted:,} elements for {what}, as its shapes say"
    return CheckpointError(files.folder, must, got=f"{have:,}", do=_OTHER_SAVE)


def _cut(pieces: Sequence[torch.Tensor], start: int, numel: int) -> Iterator[Run]:
    """Yield elements `[start, start + numel)` of pieces that follow each other."""
    begin = 0
    for piece in pieces:
        low, high = max(start, begin), min(start + numel, begin + piece.numel())
        if low < high:
            yield low - start, piece[low - begin : high - begin]
        begin += piece.numel()


# --- stages 1 and 2 ---------------------------------------------------------------------------------------


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
            parameters.append(_parameter(model, name, shape, group, weight, **own))
            end += numel
        have = sum(piece.numel() for piece in pieces)
        if not end <= have < end + 2 * len(pieces):
            raise _does_not_fit(files, f"group {group}", end, have)
    frozen = dict(model.get("frozen_param_fragments") or {})
    known = {saved.name for saved in parameters} | frozen.keys()
    known |= {alias for alias, name in (model.get("shared_params") or {}).items() if name in known}
    known |= set(model.get("buffer_names") or ())
    # Stage 1 saves frozen parameters only among the weights.
    frozen |= {name: value for name, value in module.items() if name not in known}
    for name, value in frozen.items():
        runs = ((0, value.detach().reshape(-1)),) if value.numel() else ()
        parameters.append(_parameter(model, name, value.shape, -1, runs))
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


# --- stage 3 ----------------------------------------------------------------------------------------------


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
        parameters.append(_parameter(model, name, shape, group_of.get(sub, 0), weight, **kept))
        end += share
    for rank, own_flats in enumerate(flats):
        have = sum(flat.numel() for flat in own_flats)
        if have != end:
            raise _does_not_fit(files, f"rank {rank}", end, have)
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        parts = [[state["frozen_param_fragments"][name]] for state in files.models]
        numel = math.prod(shape)
        runs = _shares(parts, 0, -(-numel // ranks), numel)
        parameters.append(_parameter(model, name, shape, -1, runs))
    updates = _count_updates([base["state"] for base in bases], groups)
    return StageContents(parameters, groups, updates, states[0].get("loss_scaler"))


def _shares(flats: Sequence[Sequence[torch.Tensor]], start: int, share: int, numel: int) -> Iterator[Run]:
    """Yield a parameter that is cut into one piece of `share` elements per rank, the last ones shorter."""
    for rank, own in enumerate(flats):
        count = min(share, numel - rank * share)
        for begin, values in _cut(own, start, max(count, 0)):
            yield rank * share + begin, values


# --- stage 0 ----------------------------------------------------------------------------------------------


def stage_0(files: DeepSpeedFiles) -> StageContents:
    """Return the weights alone: the optimizer's state is saved by numbers, without names."""
    model = files.models[0]
    buffers = set(model.get("buffer_names") or ())
    names: dict[tuple[int, int, int], list[str]] = {}
    """Storage, offset and size -> names; tied parameters share memory."""
    for name, value in model["module"].items():
        if name not in buffers:
            place = (value.untyped_storage().data_ptr(), int(value.storage_offset()), value.numel())
            key = place if value.numel() else (-1, len(names), 0)
            names.setdefault(key, []).append(name)
    parameters = []
    for name, *aliases in names.values():
        value = model["module"][name]
        weight = ((0, value.reshape(-1)),) if value.numel() else ()
        parameters.append(DeepSpeedParameter(name, tuple(aliases), tuple(value.shape), 0, weight, {}))
    saved = model.get("optimizer") or {}
    base = saved.get("optimizer_state_dict", saved)
    groups, state = base.get("param_groups", ()), base.get("state", {})
    note = (
        "Stage 0 saves the optimizer's state without names: masters and moments were left out. Save once at "
        "stage 1 to keep them."
    )
    scaler = saved if "cur_scale" in saved else None
    return StageContents(
        parameters, groups, _count_updates([state], groups), scaler, (note,) if groups else ()
    )
