"""Whether the model's parameters still are what the engine was given, and how to load into them.

The counterpart of `engine/attached.py`: torch swaps a parameter between its sharded and its gathered form,
and any other object in its place would be trained by nobody. Loading is let in only where full values are
shown, by name, as there.

Invariant: a parameter that is neither form is named in an error before anything is computed with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zerodrift.backends.group import Member
from zerodrift.engine.attached import LOAD
from zerodrift.errors import ModelError, Problems


class TensorsAttached:
    """All places of a model."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = tuple(members)
        self._shown: Mapping[str, nn.Parameter] = {}
        """What the parameters are while they can be written, by row name."""

    def check(self, *, stepping: bool = False) -> None:
        """Raise where a parameter has left its place; before a step, where one is not trained."""
        problems = Problems()
        for member in self._members:
            for module, attribute in member.places:
                problem = _problem(member, module._parameters.get(attribute), stepping=stepping)
                if problem is not None:
                    problems.add(member.row.name, *problem)
        problems.raise_as(ModelError)

    def open(self, shown: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        """These full parameters hang in the model, and what is written to them will be kept; returns which
        did before."""
        outer, self._shown = self._shown, {**self._shown, **shown}
        return outer

    def close(self, outer: Mapping[str, nn.Parameter]) -> None:
        self._shown = outer

    def attach(self) -> list[Any]:
        """Hooks that refuse `load_state_dict` where its values would be lost; returns their handles."""
        held: dict[nn.Module, list[tuple[Member, str]]] = {}
        for member in self._members:
            for module, attribute in member.places:
                held.setdefault(module, []).append((member, attribute))
        handles = []
        for module, places in held.items():
            handles.append(module.register_load_state_dict_pre_hook(self._takes(places)))
            handles.append(module.register_load_state_dict_post_hook(self._shows(places)))
        return handles

    def _takes(self, places: list[tuple[Member, str]]) -> Any:
        @torch.no_grad()
        def take(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            for member, attribute in places:
                key = prefix + attribute
                if key not in state:
                    continue
                shown = self._shown.get(member.row.name)
                if shown is None:
                    raise ModelError(
                        f"`{member.row.name}`: must be loaded inside `engine.gathered(write=True)`, where "
                        f"its full value is there and reaches the optimizer; got `load_state_dict` outside "
                        f"of it."
                    )
                if state[key].shape != shown.shape:
                    continue  # torch says so, better than we could
                shown.copy_(state[key])
                # torch's own hooks expect the sharded form here, before and after.
                module._parameters[attribute] = member.sharded
                state[key] = member.sharded

        return take

    def _shows(self, places: list[tuple[Member, str]]) -> Any:
        def show(module: nn.Module, keys: Any) -> None:
            for member, attribute in places:
                shown = self._shown.get(member.row.name)
                if shown is not None:
                    module._parameters[attribute] = shown

        return show


def _problem(member: Member, found: nn.Parameter | None, *, stepping: bool) -> tuple[str, str, str] | None:
    """What must hold, what is, and what to do."""
    storage = member.row.columns.storage.dtype
    if found is not member.sharded and found is not member.full:
        return "must stay the parameter that the engine was given", "another one", LOAD
    if member.sharded.dtype is not storage.torch:
        return f"must stay {storage}, as planned", str(member.sharded.dtype), LOAD
    trained = member.row.columns.update is not None
    grows = stepping or (not trained and torch.is_grad_enabled())
    if grows and found.requires_grad != trained:
        must = f"must stay {'trained' if trained else 'frozen'}, as planned"
        todo = "Set it before `initialize`, and build the engine anew to change it."
        return must, f"requires_grad={found.requires_grad}", todo
    return None
