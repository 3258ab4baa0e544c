"""DeepSpeed's ZeRO stages 1, 2 and 3: flat buffers without names, cut up between the ranks.

At stages 1 and 2 a parameter group is one buffer, its parameters one after the other, cut into equal pieces,
one per rank. At stage 3 every parameter is cut by itself, and a rank's buffers hold its piece of each.

Invariant: lengths and, where they were saved, the weights themselves must agree with the place that a
parameter is taken from, or there is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zerodrift.errors import CheckpointError
from zerodrift.io.deepspeed.files import DeepSpeedFiles
from zerodrift.io.deepspeed.parts import (
    DeepSpeedParameter,
    Run,
    StageContents,
    aliases_of,
    does_not_fit,
    frozen_one,
    updates_of,
)

GLANCE = 4096
"""Elements of each run that are compared with the model's weights, spread over it."""


# --- stages 1 and 2 -------------------------------------------------------------------------------------


def stage_1_or_2(files: DeepSpeedFiles) -> StageContents:
    model, states = files.models[0], [state["optimizer_state_dict"] for state in files.optimizers]
    aliases = aliases_of(model)
    parameters: list[DeepSpeedParameter] = []
    bases = [_base(state["base_optimizer_state"]) for state in states]
    for state in states:
        have = len(state["single_partition_of_fp32_groups"])
        if have != len(model["param_shapes"]):
            raise CheckpointError(
                files.folder,
                f"must hold masters of {len(model['param_shapes'])} parameter groups, as its shapes say",
                got=have,
                do="The files are of different saves.",
            )
    for group, shapes in enumerate(model["param_shapes"]):
        pieces = [state["single_partition_of_fp32_groups"][group] for state in states]
        moments = _moments(
            [base.get(group, {}) for base in bases], [piece.numel() for piece in pieces], files
        )
        end = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            weight = tuple(_cut(pieces, end, numel))
            _check_values(files, name, model["module"].get(name), weight)
            own = {key: tuple(_cut(flats, end, numel)) for key, flats in moments.items()}
            parameters.append(
                DeepSpeedParameter(name, aliases.get(name, ()), tuple(shape), True, group, weight, own)
            )
            end += numel
        have = sum(piece.numel() for piece in pieces)
        if not end <= have < end + 2 * len(pieces):
            raise does_not_fit(files, f"group {group}", end, have)
    frozen = model.get("frozen_param_fragments") or {}
    parameters += [frozen_one(name, value, aliases) for name, value in frozen.items()]
    known = {saved.name for saved in parameters} | set(model.get("buffer_names") or ())
    known |= {alias for saved in parameters for alias in saved.aliases}
    # Stage 1 saves frozen parameters among the weights alone.
    rest = [name for name in model["module"] if name not in known]
    parameters += [frozen_one(name, model["module"][name], aliases) for name in rest]
    base = states[0]["base_optimizer_state"]
    groups = base.get("param_groups", ()) if isinstance(base, dict) else ()
    return StageContents(parameters, groups, updates_of(bases, groups), states[0].get("loss_scaler"))


def _base(state: Any) -> Mapping[int, Mapping[str, Any]]:
    """The moments of every group; an elastic checkpoint has a list of them."""
    return dict(enumerate(state)) if isinstance(state, list) else state.get("state", {})


def _moments(
    states: Sequence[Mapping[str, Any]], lengths: Sequence[int], files: DeepSpeedFiles
) -> dict[str, list[torch.Tensor]]:
    """Key -> the flat piece of each rank, without what was only padding."""
    keys = [k for k, value in states[0].items() if isinstance(value, torch.Tensor) and value.dim() == 1]
    moments: dict[str, list[torch.Tensor]] = {}
    for key in keys:
        flats = [state[key] for state in states]
        if any(flat.numel() < length for flat, length in zip(flats, lengths, strict=True)):
            raise does_not_fit(files, f"moment {key}", sum(lengths), sum(flat.numel() for flat in flats))
        moments[key] = [flat[:length] for flat, length in zip(flats, lengths, strict=True)]
    return moments


def _cut(pieces: Sequence[torch.Tensor], start: int, numel: int) -> Iterator[Run]:
    """Elements `[start, start + numel)` of pieces that lie one after the other."""
    begin = 0
    for piece in pieces:
        low, high = max(start, begin), min(start + numel, begin + piece.numel())
        if low < high:
            yield low - start, piece[low - begin : high - begin]
        begin += piece.numel()


def _check_values(
    files: DeepSpeedFiles, name: str, shown: torch.Tensor | None, weight: Sequence[Run]
) -> None:
    """The weights that the model computed with were saved too, and are the masters rounded. One look at each
    run finds files of different saves, and any other order of the parameters than the one taken here."""
    if shown is None or not shown.is_floating_point():
        return
    for start, values in weight:
        step = -(-values.numel() // GLANCE)
        there = shown.reshape(-1)[start : start + values.numel() : step]
        mine = values[::step].to(shown.dtype)
        if not torch.equal(mine.nan_to_num(nan=0.5), there.nan_to_num(nan=0.5)):
            raise CheckpointError(
                files.folder,
                f"must have masters of `{name}` that round to its weights",
                got=f"others, among those from element {start} on",
                do="The files are of different saves, or of a DeepSpeed that lays them out in another way.",
            )


# --- stage 3 ----------------------------------------------------------------------------------------------


def stage_3(files: DeepSpeedFiles) -> StageContents:
    model, states = files.models[0], [state["optimizer_state_dict"] for state in files.optimizers]
    aliases, ranks = aliases_of(model), len(states)
    bases = [state["optimizer_state_dict"] for state in states]
    flats = [state["fp32_flat_groups"] for state in states]
    shapes = [(name, shape) for part in model["param_shapes"] for name, shape in part.items()]
    moments: dict[str, list[list[torch.Tensor]]] = {}
    """Key -> rank -> sub-group."""
    for rank, base in enumerate(bases):
        own = [base["state"].get(number, {}) for number in range(len(flats[rank]))]
        for key in [k for k, v in own[0].items() if isinstance(v, torch.Tensor) and v.dim() == 1]:
            moments.setdefault(key, []).append([state[key] for state in own])
    group_of = _sub_group_of(bases[0]["param_groups"])
    parameters, end, bounds = [], 0, _ends(flats[0])
    for name, shape in shapes:
        numel = math.prod(shape)
        share = -(-numel // ranks)
        sub = next((number for number, bound in enumerate(bounds) if end < bound), len(bounds) - 1)
        weight = tuple(_shares(flats, end, share, numel))
        own_moments = {key: tuple(_shares(kept, end, share, numel)) for key, kept in moments.items()}
        group = group_of.get(sub, 0)
        parameters.append(
            DeepSpeedParameter(name, aliases.get(name, ()), tuple(shape), True, group, weight, own_moments)
        )
        end += share
    for rank, kept in enumerate(flats):
        if _ends(kept)[-1] != end:
            raise does_not_fit(files, f"rank {rank}", end, _ends(kept)[-1])
    frozen = model.get("frozen_param_shapes") or {}
    for name, shape in frozen.items():
        parts = [[state["frozen_param_fragments"][name]] for state in files.models]
        numel = math.prod(shape)
        runs = tuple(_shares(parts, 0, -(-numel // ranks), numel))
        parameters.append(DeepSpeedParameter(name, aliases.get(name, ()), tuple(shape), False, -1, runs, {}))
    groups = bases[0]["param_groups"]
    updates = updates_of([base["state"] for base in bases], groups)
    return StageContents(parameters, groups, updates, states[0].get("loss_scaler"))


def _ends(flats: Sequence[torch.Tensor]) -> list[int]:
    ends, end = [], 0
    for flat in flats:
        end += flat.numel()
        ends.append(end)
    return ends or [0]


def _shares(flats: Sequence[Sequence[torch.Tensor]], start: int, share: int, numel: int) -> Iterator[Run]:
    """A parameter that is cut into one piece of `share` elements per rank, the last ones shorter."""
    for rank, own in enumerate(flats):
        count = min(share, numel - rank * share)
        for begin, values in _cut(own, start, max(count, 0)):
            yield rank * share + begin, values


def _sub_group_of(groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Sub-group -> parameter group."""
    return {number: group for group, options in enumerate(groups) for number in options.get("params", ())}
