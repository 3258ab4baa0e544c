"""Watch optimizer steps and saved files: the tensors that are updated, kept of each, and written."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerodrift.inspect.trace.hooks import Patches, when_imported
from zerodrift.inspect.trace.model import LiveModel
from zerodrift.inspect.trace.parameter import LiveParameter, local
from zerodrift.inspect.trace.places import line_of_script
from zerodrift.inspect.trace.records import dtype_name
from zerodrift.inspect.trace.state import OptimizedPart, WatchState, guarded


@dataclass(slots=True)
class _OptimizedTensor:
    """A tensor that an optimizer updates."""

    tensor: weakref.ref[torch.Tensor]
    parts: Sequence[OptimizedPart]
    given: set[torch.dtype | None] = field(default_factory=set)
    """Dtypes of gradients that it was given; None for no gradient."""
    kept: list[Any] = field(default_factory=list)
    """Dtypes of its state when that was last looked at."""


class StepWatch:
    """Hooks on every `torch.optim.Optimizer`."""

    def __init__(self, state: WatchState) -> None:
        self.state = state
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._under_way: tuple[Any, list[tuple[torch.Tensor, _OptimizedTensor]]] = (None, [])
        self._stepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The backward passes that there had been at an optimizer's last step."""

    def begin(self) -> None:
        patches = self.state.patches
        patches.undo(register_optimizer_step_pre_hook(self._begins).remove)
        patches.undo(register_optimizer_step_post_hook(self._ends).remove)
        patches.replace(torch.optim.Optimizer, "__init__", self._init)

    def were(self, steps: int) -> bool:
        """Return True if everything that is updated was updated so many times."""
        counts = list(self.state.counts.values()) or [0]
        if max(counts) >= 4 * steps:
            return True
        idle = (tensor for made in self._made if made not in self._stepped for tensor in _tensors(made))
        return min(counts) >= steps and all(self.state.resting(tensor) is None for tensor in idle)

    def _init(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(optimizer, *args, **kwargs)
        if self.state.active:
            with contextlib.suppress(TypeError):
                self._made.add(optimizer)
        return out

    @guarded
    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._under_way = optimizer, self._pairs(optimizer)
        for tensor, updated in self._under_way[1]:
            gradient = tensor.grad
            dtype = None if gradient is None else gradient.dtype
            if dtype not in updated.given:
                updated.given.add(dtype)
                for part in updated.parts:
                    _see_given(part, tensor, dtype)
            if gradient is not None:
                for part in updated.parts:
                    if self.state.several or not part.parameter.has_gradient:
                        part.parameter.samples.given(local(gradient), part.begin, part.at, part.length)

    @guarded
    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        states, (begun, pairs) = getattr(optimizer, "state", {}), self._under_way
        self._under_way = None, []
        if begun is not optimizer:
            pairs = self._pairs(optimizer)
        for tensor, updated in pairs:
            state = states.get(tensor)
            held = state.values() if isinstance(state, dict) else ()
            kept = [value.dtype if isinstance(value, torch.Tensor) else None for value in held]
            if kept != updated.kept or not kept:
                updated.kept = kept
                _see_kept(type(optimizer).__name__, updated.parts, tensor, state)
        self._count(optimizer, [part.parameter for _, updated in pairs for part in updated.parts])

    def _count(self, optimizer: Any, parameters: Sequence[LiveParameter]) -> None:
        passes = self.state.passes
        arrived = max((parameter.arrived_since_step() for parameter in parameters), default=0)
        since = passes - self._stepped.get(optimizer, 0)
        if since or not passes:  # none for a group of a step that was counted
            self._stepped[optimizer] = passes
            micro_batches = min(since, arrived) if arrived else since
            self.state.has_stepped(parameters[0] if parameters else optimizer, micro_batches)

    def _pairs(self, optimizer: Any) -> list[tuple[torch.Tensor, _OptimizedTensor]]:
        return [(tensor, self._of(optimizer, tensor)) for tensor in _tensors(optimizer)]

    def _of(self, optimizer: Any, tensor: torch.Tensor) -> _OptimizedTensor:
        """Return a tensor with the parameters in it, found once."""
        known = self.state.optimized.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        updated = _OptimizedTensor(weakref.ref(tensor), self._parts(optimizer, tensor))
        if updated.parts:
            self.state.optimized[id(tensor)] = updated
        return updated

    def _parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart]:
        for adapter in self.state.adapters:
            parts = adapter.parts(optimizer, tensor)
            if parts is not None:
                return parts
        parameter = self.state.resting(tensor)
        if parameter is not None:
            return (OptimizedPart(parameter, parameter.begin),)
        for model in self.state.models:
            parameter = model.copied(tensor)
            if parameter is not None:
                return (OptimizedPart(parameter),)
        return ()


def _tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _see_given(part: OptimizedPart, tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
    parameter = part.parameter
    parameter.optimized = True
    if parameter.tensor() is tensor:
        parameter.record.add("master", "same", "the parameter itself")
    else:
        parameter.record.add("master", dtype_name(tensor.dtype), "a tensor of the optimizer's own")
        parameter.began(local(tensor), part.at, part.length)
    if part.sums and dtype is not None:
        parameter.record.add("accumulate", dtype_name(dtype), ".grad", "", line_of_script)


def _see_kept(name: str, parts: Sequence[OptimizedPart], tensor: torch.Tensor, state: Any) -> None:
    kept = _moments(state, tensor)
    for part in parts:
        for key, moment in kept:
            part.parameter.record.add("state", dtype_name(moment.dtype), f"{name} {key}")
        if not kept and local(tensor).numel():
            part.parameter.record.unseen["state"] = f"{name} keeps none"


def _moments(state: Any, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the states of every element or every block of elements, and no counters."""
    if not isinstance(state, dict):
        return []
    numel = local(tensor).numel()
    least = min(max(2, numel // 4096), numel)
    kept = [(str(key), local(value)) for key, value in state.items() if isinstance(value, torch.Tensor)]
    return [(key, value) for key, value in kept if value.numel() >= least]


class ExportWatch:
    """Hooks on the functions that write tensors to files."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[tuple[int, ...], str, str, str]] = {}
        """Name in the file -> shape, dtype, the function that wrote it, line."""
        self._patches = Patches()

    def begin(self) -> None:
        patches = self._patches
        patches.replace(torch, "save", self._saves("torch.save"))

        def safetensors(module: Any) -> None:
            patches.replace(module, "save_file", self._saves("safetensors"))

        patches.undo(when_imported("safetensors.torch", safetensors))

    def end(self) -> None:
        self._patches.restore()

    def _saves(self, by: str) -> Callable[..., Any]:
        def save(original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
            line = line_of_script()
            for name, tensor in _named(tensors):
                self._written[name] = (tuple(tensor.shape), dtype_name(tensor.dtype), by, line)
            return original(tensors, *args, **kwargs)

        return save

    def see(self, models: Iterable[LiveModel]) -> None:
        """Match written names, which may have a prefix or lack a wrapper's, with parameters."""
        for record in (parameter.record for model in models for parameter in model.parameters):
            for name in (record.name, *record.also):
                for written, (shape, dtype, by, line) in self._written.items():
                    same = written == name or written.endswith("." + name) or name.endswith("." + written)
                    if same and shape == record.shape:
                        record.add("export", dtype, by, "", line)
                        record.unseen.pop("export", None)


def _named(value: Any, depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating tensors of a checkpoint, a dict of dicts."""
    for key, item in value.items() if isinstance(value, dict) and depth else ():
        if isinstance(item, torch.Tensor):
            if isinstance(key, str) and item.is_floating_point():
                yield key, item
        else:
            yield from _named(item, depth - 1)
