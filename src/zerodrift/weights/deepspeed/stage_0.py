"""Match the optimizer's state of stage 0, which has numbers for names, with the model's parameters.

Invariant: a state is given to a parameter only where there is one way to assign it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Held = dict[str, tuple[int, torch.Tensor, dict[str, torch.Tensor]]]
"""Name -> (group, fp32 master or weight, moments)."""


def hold_flat(
    weights: Mapping[str, torch.Tensor], masters: Sequence[torch.Tensor], state: Mapping[str, Any]
) -> Held:
    """Cut one group that is one flat buffer, in the order of the model; several cannot be assigned."""
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
    """Name the parameters of an optimizer, or return nothing if neither shapes nor values tell them apart."""
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
    """Return the name of each number, or nothing if there is a choice.

    A group's parameters are in the order of the model; if it holds all parameters of its shapes, there is one
    way to assign them.
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
    """Return the name of each number whose master rounds to one parameter alone, or nothing."""
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
