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
from zerodrift.inspect.trace.parameter import local
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
    kept: list[Any] = field(default_factory=list)  # dtypes of its state when that was last looked at


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
        self._under_way = optimizer, self._updated(optimizer)
        for tensor, updated in self._under_way[1]:
            gradient = tensor.grad
            dtype = None if gradient is None else gradient.dtype
            if dtype not in updated.given:
                updated.given.add(dtype)
                for part in updated.parts:
                    _see_given(part, tensor, dtype)
            for part in updated.parts:
                if gradient is not None and (self.state.several or not part.parameter.has_gradient):
                    part.parameter.samples.given(local(gradient), part.begin, part.at, part.length)

    @guarded
    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        state, (begun, pairs) = self.state, self._under_way
        self._under_way = None, []
        if begun is not optimizer:
            pairs = self._updated(optimizer)
        for tensor, updated in pairs:
            held = getattr(optimizer, "state", {}).get(tensor)
            held = held if isinstance(held, dict) else {}
            kept = [value.dtype if isinstance(value, torch.Tensor) else None for value in held.values()]
            if kept != updated.kept or not kept:
                updated.kept = kept
                _see_kept(type(optimizer).__name__, updated.parts, tensor, held)
        parameters = [part.parameter for _, updated in pairs for part in updated.parts]
        arrived = max((parameter.arrived_since_step() for parameter in parameters), default=0)
        since = state.passes - self._stepped.get(optimizer, 0)
        if since or not state.passes:  # none for a group of a step that was counted
            self._stepped[optimizer] = state.passes
            state.has_stepped(parameters[0] if parameters else optimizer, min(since, arrived or since))

    def _updated(self, optimizer: Any) -> list[tuple[torch.Tensor, _OptimizedTensor]]:
        """Return an optimizer's tensors with the parameters in them, which are found once."""
        pairs = []
        for tensor in _tensors(optimizer):
            known = self.state.optimized.get(id(tensor))
            if known is None or known.tensor() is not tensor:
                known = _OptimizedTensor(weakref.ref(tensor), self._parts(optimizer, tensor))
                if known.parts:
                    self.state.optimized[id(tensor)] = known
            pairs.append((tensor, known))
        return pairs

    def _parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart]:
        for adapter in self.state.adapters:
            parts = adapter.parts(optimizer, tensor)
            if parts is not None:
                return parts
        parameter = self.state.resting(tensor)
        if parameter is not None:
            return (OptimizedPart(parameter, parameter.begin),)
        copies = (model.copied(tensor) for model in self.state.models)
        return [OptimizedPart(copied) for copied in copies if copied is not None][:1]


def _tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (tensor for tensor in group["params"] if isinstance(tensor, torch.Tensor))


def _see_given(part: OptimizedPart, tensor: torch.Tensor, dtype: torch.dtype | None) -> None:
    parameter = part.parameter
    parameter.optimized = True
    if parameter.tensor() is tensor:
        parameter.record.add("master", "same", "the parameter itself")
    else:
        parameter.record.add("master", dtype_name(tensor.dtype), "a tensor of the optimizer's own")
    if part.sums and dtype is not None:
        parameter.record.add("accumulate", dtype_name(dtype), ".grad", "", line_of_script)


def _see_kept(name: str, parts: Sequence[OptimizedPart], tensor: torch.Tensor, held: dict[Any, Any]) -> None:
    """Record the states of every element or every block of elements, and no counters."""
    numel = local(tensor).numel()
    least = min(max(2, numel // 4096), numel)
    tensors = {key: local(value) for key, value in held.items() if isinstance(value, torch.Tensor)}
    kept = {key: value for key, value in tensors.items() if value.numel() >= least}
    for part in parts:
        for key, moment in kept.items():
            part.parameter.record.add("state", dtype_name(moment.dtype), f"{name} {key}")
        if not kept and numel:
            part.parameter.record.unseen["state"] = f"{name} keeps none"


class ExportWatch:
    """Hooks on the functions that write tensors to files."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[tuple[int, ...], str, str, str]] = {}
        """Name in the file -> shape, dtype, the function that wrote it, line."""
        self._patches = Patches()
        self.end = self._patches.restore

    def begin(self) -> None:
        replace = self._patches.replace
        replace(torch, "save", self._saves("torch.save"))

        def imported(module: Any) -> None:
            replace(module, "save_file", self._saves("safetensors"))

        self._patches.undo(when_imported("safetensors.torch", imported))

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
        if not isinstance(item, torch.Tensor):
            yield from _named(item, depth - 1)
        elif isinstance(key, str) and item.is_floating_point():
            yield key, item
