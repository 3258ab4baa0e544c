"""Check that the model still has the engine's parameters, and refuse loads that would not reach them.

The counterpart of `engine/habits/parameter_guard.py`. torch registers a parameter in its sharded or its
gathered form; any other object in its place would not be trained. Loading is allowed only inside
`engine.gathered(write=True)`.

Invariant: an object that is neither form, and a sharded parameter with which a module would compute, is named
in an error before anything is computed with it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from zerodrift.backends.group import LiveGroup, Member
from zerodrift.engine import LOAD
from zerodrift.errors import ModelError, Problem, Problems


class TensorGuard:
    """All parameters of a model under `fully_shard`."""

    def __init__(self, groups: Iterable[LiveGroup], units: Mapping[str, str]) -> None:
        """`units` has the unit of each parameter by row name."""
        self._groups, self._units = tuple(groups), units
        self._members = tuple(member for group in self._groups for member in group.members)
        self._shown: Mapping[str, nn.Parameter] = {}
        """Full parameters that are registered in the model inside `gathered`, by row name."""
        self._written: Mapping[str, nn.Parameter] = {}
        """The shown parameters that may be written."""

    def check(self, members: Iterable[Member] | None = None, *, stepping: bool = False) -> None:
        """Raise if another object is in the place of a parameter, or if `requires_grad` has changed."""
        problems = Problems()
        for member in self._members if members is None else members:
            for module, attribute in member.places:
                problem = _problem(member, module._parameters.get(attribute), stepping=stepping)
                if problem is not None:
                    problems.include(problem)
        problems.raise_as(ModelError)

    @contextlib.contextmanager
    def showing(self, shown: Mapping[str, nn.Parameter], *, write: bool) -> Iterator[None]:
        """Record which full parameters the model shows inside the context. With `write`, writes are kept."""
        outer = self._shown, self._written
        self._shown = {**self._shown, **shown}
        self._written = {**self._written, **shown} if write else self._written
        try:
            yield
        finally:
            self._shown, self._written = outer

    def attach(self) -> list[Any]:
        """Put hooks on modules that refuse `load_state_dict` if its values would be lost, and forwards that
        torch would run with other values or with slices. Return the handles."""
        held: dict[nn.Module, list[tuple[Member, str]]] = {}
        for member in self._members:
            for module, attribute in member.places:
                held.setdefault(module, []).append((member, attribute))
        handles = []
        for group in self._groups:
            for module in group.modules:
                # Before torch's own, which puts the gathered form wherever it was.
                require = partial(self._require_unchanged, group)
                handles.append(module.register_forward_pre_hook(require, prepend=True))
        for module, places in held.items():
            handles.append(module.register_forward_pre_hook(partial(self._require_gathered, places)))
            handles.append(module.register_load_state_dict_pre_hook(partial(self._before_load, places)))
            handles.append(module.register_load_state_dict_post_hook(partial(self._after_load, places)))
        return handles

    def _require_unchanged(self, group: LiveGroup, module: nn.Module, args: Any) -> None:
        self.check(member for member in group.members if member.row.name not in self._shown)

    def _require_gathered(self, places: list[tuple[Member, str]], module: nn.Module, args: Any) -> None:
        for member, attribute in places:
            if module._parameters.get(attribute) is member.sharded:
                name = member.row.names[member.places.index((module, attribute))]
                raise not_gathered(name.rpartition(".")[0], self._units[member.row.name])

    @torch.no_grad()
    def _before_load(
        self, places: list[tuple[Member, str]], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        for member, attribute in places:
            key = prefix + attribute
            if key not in state:
                continue
            shown = self._written.get(member.row.name)
            if shown is None:
                must = "must be loaded inside `engine.gathered(write=True)`, where its full value "
                must += "is there and reaches the optimizer"
                raise ModelError(member.row.name, must, got="`load_state_dict` outside of it")
            if state[key].shape != shown.shape:
                continue  # torch raises a better error
            shown.copy_(state[key])
            # torch's own hooks expect the sharded form here, before and after.
            module._parameters[attribute] = member.sharded
            state[key] = member.sharded

    def _after_load(self, places: list[tuple[Member, str]], module: nn.Module, keys: Any) -> None:
        for member, attribute in places:
            shown = self._written.get(member.row.name)
            if shown is not None:
                module._parameters[attribute] = shown


def _problem(member: Member, current: nn.Parameter | None, *, stepping: bool) -> Problem | None:
    name, storage = member.row.name, member.row.columns.storage.dtype
    if current is not member.sharded and current is not member.full:
        return Problem(
            name, "must stay the parameter that was passed to the engine", got="another one", do=LOAD
        )
    if member.sharded.dtype is not storage.torch:
        return Problem(name, f"must stay {storage}, as planned", got=str(member.sharded.dtype), do=LOAD)
    trained = member.row.trained
    grows = stepping or (not trained and torch.is_grad_enabled())
    if grows and current.requires_grad != trained:
        must = f"must stay {'trained' if trained else 'frozen'}, as planned"
        do = "Set it before `initialize`; to change it, build a new engine."
        return Problem(name, must, got=f"requires_grad={current.requires_grad}", do=do)
    return None


def not_gathered(path: str, unit: str) -> ModelError:
    """Return the error for a module that is called while its unit is not gathered."""
    todo = "Call the model"
    if unit:
        todo = (
            f"Call `{unit}` itself, not its parts or its `forward`, or write `sharding.units: "
            f"{finer(unit, path + '.')}`, so that its parts are gathered by themselves; else call "
            f"the model"
        )
    must, do = (
        "its parameters must be gathered when it is called",
        f"{todo}, or call it inside `engine.gathered()`.",
    )
    return ModelError(path or "model", must, got="sharded ones", do=do)


def finer(unit: str, name: str) -> str:
    """Return globs for `sharding.units`, as in a config, that make units of the parts of a unit, down to the
    module of a parameter."""
    depth = name.count(".") - unit.count(".") - 1 if unit else 0
    shape = re.sub(r"(?<![^.])\d+(?![^.])", "*", unit)
    return json.dumps([shape + ".*" * deep for deep in range(1, max(1, depth) + 1)])
