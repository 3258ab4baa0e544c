"""DeepSpeed's stage 0: weights by name, and an optimizer's state by its own numbers.

Which parameter a number means was not saved. It is taken from the shapes where those leave no choice, else
from the values of the masters, which round to the weights.

Invariant: what cannot be told apart is left out, with a note, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerodrift.io.deepspeed.files import DeepSpeedFiles
from zerodrift.io.deepspeed.parts import DeepSpeedParameter, StageContents, updates_of


def stage_0(files: DeepSpeedFiles) -> StageContents:
    """Weights by name, and an optimizer's state by its own numbers. Which parameter a number is, was not
    saved; it is taken from the shapes where those leave no choice."""
    model = files.models[0]
    module = model["module"]
    buffers = set(model.get("buffer_names") or ())
    own, aliases = _untied({name: value for name, value in module.items() if name not in buffers})
    saved = model.get("optimizer") or {}
    base = saved.get("optimizer_state_dict", saved)
    groups = base.get("param_groups", ())
    state = base.get("state", {})
    masters = saved.get("fp32_groups") or saved.get("fp32_groups_flat")
    flat = "fp32_groups_flat" in saved
    numbered = None if flat else _numbers(own, groups, state) or _numbers_by_value(own, groups, masters)
    if flat:
        held = _flat_groups(own, saved["fp32_groups_flat"], state)
    else:
        held = _by_number(numbered or {}, masters, groups, state)
    parameters = []
    for name, value in own.items():
        group, weight, moments = held.get(name, (-1, None, {}))
        values = value if weight is None else weight
        parameters.append(
            DeepSpeedParameter(
                name,
                aliases.get(name, ()),
                tuple(value.shape),
                group >= 0 or not held,
                group,
                ((0, values.reshape(-1)),) if value.numel() else (),
                {key: ((0, moment.reshape(-1)),) for key, moment in moments.items()},
            )
        )
    notes: tuple[str, ...] = ()
    if groups and not held:
        notes = (
            "Stage 0 saves the optimizer's state without names, and shapes do not tell its parameters apart: "
            "masters and moments were left out. Save once at stage 1 to keep them.",
        )
    scaler = saved if "cur_scale" in saved else None
    return StageContents(parameters, groups, updates_of([state], groups), scaler, notes)


_Held = dict[str, tuple[int, "torch.Tensor | None", dict[str, torch.Tensor]]]
"""Name -> (group, fp32 master, moments)."""


def _untied(module: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, tuple[str, ...]]]:
    """Parameters once, and the other names of those that share memory."""
    first: dict[tuple[int, int, int], str] = {}
    own: dict[str, torch.Tensor] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, value in module.items():
        place = (value.untyped_storage().data_ptr(), int(value.storage_offset()), value.numel())
        home = first.setdefault(place, name) if value.numel() else name
        if home == name:
            own[name] = value
        else:
            aliases[home] = (*aliases.get(home, ()), name)
    return own, aliases


def _numbers(
    own: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[int, Mapping[str, Any]],
) -> dict[int, tuple[int, str]] | None:
    """Number of the optimizer -> (group, name); None where shapes leave a choice.

    A group's parameters are in the order of the model. If all parameters of the shapes that a group has are
    in it, there is one way to say which they are.
    """
    by_number: dict[int, tuple[int, str]] = {}
    for group, options in enumerate(groups):
        shapes = [_shape_of(state.get(number, {})) for number in options["params"]]
        if any(shape is None for shape in shapes):
            return None
        kinds = set(shapes)
        names = [name for name, value in own.items() if tuple(value.shape) in kinds]
        if [tuple(own[name].shape) for name in names] != shapes:
            return None
        by_number |= {number: (group, name) for number, name in zip(options["params"], names, strict=True)}
    names = [name for _, name in by_number.values()]
    return by_number if by_number and len(set(names)) == len(names) else None


def _numbers_by_value(
    own: Mapping[str, torch.Tensor], groups: Sequence[Mapping[str, Any]], masters: Any
) -> dict[int, tuple[int, str]] | None:
    """The same, where there are masters: each rounds to the weight of one parameter alone."""
    by_number: dict[int, tuple[int, str]] = {}
    for group, options in enumerate(groups if masters else ()):
        for number, master in zip(options["params"], masters[group], strict=True):
            alike = [name for name, value in own.items() if _rounds_to(master, value)]
            if len(alike) != 1:
                return None
            by_number[number] = (group, alike[0])
    return by_number or None


def _rounds_to(master: torch.Tensor, value: torch.Tensor) -> bool:
    return master.shape == value.shape and torch.equal(master.to(value.dtype), value)


def _shape_of(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    shapes = {tuple(v.shape) for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step"}
    return shapes.pop() if len(shapes) == 1 else None


def _by_number(
    numbered: Mapping[int, tuple[int, str]],
    masters: Any,
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[int, Mapping[str, Any]],
) -> _Held:
    held: _Held = {}
    for group, options in enumerate(groups):
        for place, number in enumerate(options["params"]):
            if number not in numbered:
                continue
            weight = masters[group][place] if masters else None
            own = {
                k: v for k, v in state.get(number, {}).items() if isinstance(v, torch.Tensor) and k != "step"
            }
            held[numbered[number][1]] = (group, weight, own)
    return held


def _flat_groups(
    own: Mapping[str, torch.Tensor], masters: Sequence[torch.Tensor], state: Mapping[int, Mapping[str, Any]]
) -> _Held:
    """One group as one flat buffer, in the order of the model; several cannot be told apart."""
    total = sum(value.numel() for value in own.values())
    if len(masters) != 1 or masters[0].numel() != total:
        return {}
    held: _Held = {}
    end = 0
    flats = {k: v for k, v in state.get(0, {}).items() if isinstance(v, torch.Tensor) and v.numel() == total}
    for name, value in own.items():
        part = slice(end, end + value.numel())
        held[name] = (0, masters[0][part], {key: flat[part] for key, flat in flats.items()})
        end += value.numel()
    return held
