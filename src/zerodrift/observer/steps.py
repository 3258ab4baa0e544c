"""Steps of optimizers of a run that is watched: what they update, with what, and what they keep of it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerodrift.observer.adapter import Adapter, OptimizedPart
from zerodrift.observer.calls import moments, optimized
from zerodrift.observer.guard import guarded
from zerodrift.observer.lines import LineOfCall
from zerodrift.observer.models import WatchedModel
from zerodrift.observer.observed import name as word
from zerodrift.observer.owners import local
from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.patches import Patches


class StepsWatcher(Protocol):
    """What a watcher does for them."""

    active: bool
    several: bool
    models: list[WatchedModel]
    adapters: tuple[Adapter, ...]
    patches: Patches

    def broken(self, error: Exception) -> None: ...
    def has_stepped(self, what: Any, micro_batches: int) -> None: ...
    def passes(self) -> int: ...
    def resting(self, tensor: torch.Tensor) -> WatchedParameter | None: ...


@dataclass(slots=True)
class _Updated:
    """A tensor that an optimizer updates."""

    tensor: weakref.ref[torch.Tensor]
    parts: Sequence[OptimizedPart]
    given: set[torch.dtype | None] = field(default_factory=set)
    """Dtypes of gradients that it was given; None for none."""
    kept: list[Any] = field(default_factory=list)
    """Dtypes of what was kept of it when it was last looked at."""


class WatchedSteps:
    """Of every `torch.optim.Optimizer`."""

    def __init__(self, watcher: StepsWatcher) -> None:
        self._watcher = watcher
        self._updated: dict[int, _Updated] = {}
        """By the id of the tensor."""
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Steps, by the first parameter that they updated: a run may make its optimizer anew."""
        self._under_way: tuple[Any, list[tuple[torch.Tensor, _Updated]]] = (None, [])
        """The optimizer whose step has begun, and what it updates."""
        self._stepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The backward passes there had been at its last step."""

    def begin(self) -> None:
        patches = self._watcher.patches
        patches.undo(register_optimizer_step_pre_hook(self._begins).remove)
        patches.undo(register_optimizer_step_post_hook(self._ends).remove)
        patches.replace(torch.optim.Optimizer, "__init__", self._init)

    def forget(self) -> None:
        """Names or packs are others than they were."""
        self._updated.clear()

    def count(self, what: Any) -> int:
        """One more of it. Returns how many there were of what has most."""
        self._counts[what] = self._counts.get(what, 0) + 1
        return max(self._counts.values())

    def were(self, steps: int) -> bool:
        """Whether everything that is updated was updated so many times."""
        if not self._counts:
            return False
        counts = list(self._counts.values())
        if max(counts) >= 4 * steps:
            return True
        waiting = (
            any(self._watcher.resting(tensor) is not None for tensor in optimized(made))
            for made in self._made
            if made not in self._stepped
        )
        return min(counts) >= steps and not any(waiting)

    def _init(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(optimizer, *args, **kwargs)
        if self._watcher.active:
            with contextlib.suppress(TypeError):
                self._made.add(optimizer)
        return out

    @guarded
    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        several, line = self._watcher.several, LineOfCall()
        pairs = [(tensor, self._of(optimizer, tensor)) for tensor in optimized(optimizer)]
        self._under_way = optimizer, pairs
        for tensor, updated in pairs:
            gradient = tensor.grad
            dtype = None if gradient is None else gradient.dtype
            if dtype not in updated.given:
                updated.given.add(dtype)
                self._see_given(updated.parts, tensor, dtype, line)
            if gradient is not None:
                for part in updated.parts:
                    if several or not part.parameter.has_gradient:
                        part.parameter.used(local(gradient), part.begin, part.at, part.length)

    def _see_given(
        self,
        parts: Sequence[OptimizedPart],
        tensor: torch.Tensor,
        dtype: torch.dtype | None,
        line: LineOfCall,
    ) -> None:
        for part in parts:
            parameter = part.parameter
            parameter.optimized = True
            if parameter.is_resting(tensor):
                parameter.seen.see("master", "same", "the parameter itself")
            else:
                parameter.seen.see("master", word(tensor.dtype), "a tensor of the optimizer's own")
                parameter.began(local(tensor), part.at, part.length)
            if part.sums and dtype is not None:
                parameter.seen.see("accumulate", word(dtype), ".grad", "", line)

    @guarded
    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        states = getattr(optimizer, "state", {})
        begun, pairs = self._under_way
        self._under_way = None, []
        if begun is not optimizer:
            pairs = [(tensor, self._of(optimizer, tensor)) for tensor in optimized(optimizer)]
        for tensor, updated in pairs:
            state = states.get(tensor)
            held = state.values() if isinstance(state, dict) else ()
            kept = [value.dtype if isinstance(value, torch.Tensor) else None for value in held]
            if kept != updated.kept or not kept:
                updated.kept = kept
                self._see_kept(type(optimizer).__name__, updated.parts, tensor, state)
        self._count(optimizer, [part.parameter for _, updated in pairs for part in updated.parts])

    def _count(self, optimizer: Any, parameters: Sequence[WatchedParameter]) -> None:
        arrived = max((parameter.arrived_since_step() for parameter in parameters), default=0)
        since = self._watcher.passes() - self._stepped.get(optimizer, 0)
        if since or not self._watcher.passes():  # none for a group of a step that was counted
            self._stepped[optimizer] = self._watcher.passes()
            micro_batches = min(since, arrived) if arrived else since
            self._watcher.has_stepped(parameters[0] if parameters else optimizer, micro_batches)

    def _see_kept(self, name: str, parts: Sequence[OptimizedPart], tensor: torch.Tensor, state: Any) -> None:
        kept = moments(state, tensor)
        for part in parts:
            for key, moment in kept:
                part.parameter.seen.see("state", word(moment.dtype), f"{name} {key}")
            if not kept and local(tensor).numel():
                part.parameter.seen.unseen["state"] = f"{name} keeps none"

    # --- whose a tensor is ----------------------------------------------------------------------------

    def _of(self, optimizer: Any, tensor: torch.Tensor) -> _Updated:
        """The parameters that an optimizer updates in a tensor."""
        known = self._updated.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        updated = _Updated(weakref.ref(tensor), self._parts(optimizer, tensor))
        if updated.parts:
            self._updated[id(tensor)] = updated
        return updated

    def _parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart]:
        for adapter in self._watcher.adapters:
            parts = adapter.parts(optimizer, tensor)
            if parts is not None:
                return parts
        parameter = self._watcher.resting(tensor)
        if parameter is not None:
            return (OptimizedPart(parameter, parameter.begin),)
        for model in self._watcher.models:
            parameter = model.copied(tensor)
            if parameter is not None:
                return (OptimizedPart(parameter),)
        return ()
