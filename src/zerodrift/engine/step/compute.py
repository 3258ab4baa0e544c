"""Compute: casts at the boundaries of the plan's modules, and autocast around the model's forward.

Floating inputs of the model are cast to the mode's dtype. A module with a boundary (`plan/boundaries.py`)
gets its floating inputs in the boundary's dtype, runs with autocast off, and returns its own dtype or its
input's. Nothing else casts.

Invariant: exactly the boundaries of the plan have hooks, and leaving a module restores autocast and the
caller's containers.

[Note: autocast] In the autocast modes the forward runs under `torch.autocast` with the configured dtype. A
caller's autocast around the engine would change the dtype of every operation against the plan. So it is
switched to the configured dtype, or off in the other modes, with one warning. Autocast inside the model's
code is left alone.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerodrift.engine.nested import Replacement, tensors_in
from zerodrift.errors import ModelError
from zerodrift.model import has_forward
from zerodrift.plan import Boundary, Plan


def attach(model: nn.Module, boundaries: Iterable[Boundary]) -> list[Any]:
    """Put casting hooks on the modules of the boundaries; returns their handles."""
    modules = dict(model.named_modules(remove_duplicate=False))
    hooked: dict[int, Boundary] = {}
    handles = []
    for boundary in boundaries:
        module = modules.get(boundary.path)
        if module is None or not has_forward(module):
            got = "no such module" if module is None else f"{type(module).__name__}, which is never called"
            must = "must be a module with a forward, at which the plan casts"
            raise ModelError(boundary.path, must, got=got, do="Plan from the module that is trained.")
        first = hooked.setdefault(id(module), boundary)
        if first is boundary:
            handles += _hooks(module, boundary)
        elif replace(first, path=boundary.path) != boundary:
            got = f"the same module, which returns otherwise by {first.path!r}"
            must = "must be a module of its own, at which the plan casts"
            raise ModelError(boundary.path, must, got=got, do="Plan from the module that is trained.")
    return handles


def _hooks(module: nn.Module, boundary: Boundary) -> list[Any]:
    calls: list[tuple[Any, ...]] = []
    """Running forwards: (replacement of the inputs; (tensor of the caller, its cast, version of the cast) of
    each input; dtype of the first floating input; context that switches autocast off, or None)."""
    own = boundary.dtype.torch
    lookup = None if boundary.lookup is None else boundary.lookup.torch

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs_given = tensors_in((args, kwargs))
        dtype = next((tensor.dtype for tensor in inputs_given if tensor.is_floating_point()), None)
        device = inputs_given[0].device.type if inputs_given else "cpu"
        # Switched only where it is on, because a compiler would trace the switch.
        switch = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else None
        if switch is not None:
            switch.__enter__()
        inputs = Replacement(lambda tensor: _cast(tensor, own))
        changed = inputs.apply((args, kwargs))
        versions = [(given, cast, cast._version) for given, cast in inputs.pairs]
        calls.append((inputs, versions, dtype, switch))
        return changed

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        # Called even when the forward raised, to restore autocast.
        inputs, versions, dtype, switch = calls.pop()
        inputs.undo()
        for given, cast, version in versions:
            if cast._version != version:
                given.copy_(cast)  # the module has changed its input in place
        if switch is not None:
            switch.__exit__(None, None, None)
        if dtype is None:
            dtype = lookup
        elif boundary.output == "keep":
            dtype = None
        if dtype is None or output is None:
            return None
        return Replacement(lambda tensor: _cast(tensor, dtype)).apply(output)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class ForwardPrecision:
    """Contexts of a forward and a backward in the plan's precision."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        mode = plan.policy.mode
        self._mode = mode
        self._units = [unit.name for unit in plan.units]
        self._dtype = mode.dtype.torch
        self._device = device.type
        self._warned = False

    def attach(self, model: nn.Module) -> list[Any]:
        """Set autocast around the model and each part that holds units, in the autocast modes, for calls of
        them without the engine, as in `generate`. Weights would be in another dtype than their inputs."""
        running: list[contextlib.AbstractContextManager[None]] = []

        def before(module: nn.Module, args: Any) -> None:
            running.append(contextlib.nullcontext() if self._around() is self._dtype else self.forward())
            running[-1].__enter__()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if running:
                running.pop().__exit__(None, None, None)

        names = (name.split(".") for name in self._units) if self._mode.autocast else ()
        paths = dict.fromkeys(".".join(name[:length]) for name in names for length in range(len(name)))
        parts = [model.get_submodule(path) for path in paths]
        handles: list[Any] = [part.register_forward_pre_hook(before) for part in parts]
        return handles + [part.register_forward_hook(after, always_call=True) for part in parts]

    def _around(self) -> torch.dtype | None:
        """Return the dtype of the caller's autocast; None where there is none."""
        return torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cast an input of the model to the mode's dtype, except in the autocast modes."""
        return tensor if self._mode.autocast else _cast(tensor, self._dtype)

    @contextlib.contextmanager
    def cast(self, inputs: Any) -> Iterator[Any]:
        """Yield the inputs with every tensor changed by `of`."""
        replacement = Replacement(self.of)
        try:
            yield replacement.apply(inputs)
        finally:
            replacement.undo()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Set autocast for a forward. See [Note: autocast]."""
        around = self._around()
        if not self._mode.autocast:
            if around is not None:
                self._say(f"is {around}, and off inside, for the config says {self._mode}")
            with contextlib.nullcontext() if around is None else torch.autocast(self._device, enabled=False):
                yield
            return
        if around not in (None, self._dtype):
            self._say(f"is {around}; switched to {self._dtype}, as the config says")
        try:
            with torch.autocast(self._device, self._dtype):
                yield
        finally:
            # torch caches cast weights until the outermost autocast context ends, even a disabled one. A
            # context around the whole loop would keep old weights beyond a step.
            torch.clear_autocast_cache()

    def _say(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            text = f"torch.autocast around the engine {what}. Leave the context out."
            warnings.warn(text, stacklevel=5)

    def backward(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a backward, without autocast: the graph has its casts already."""
        return torch.autocast(self._device, enabled=False)
