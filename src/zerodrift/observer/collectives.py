"""Collectives of a run that is watched: whose parameters or gradients each carries, and in which dtype.

Whoever issues one, torch's Python or its C++, goes through its dispatcher. There they are seen by kernels of
ours in a place where torch has none, which hand on what they are given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from zerodrift.observer.adapter import Adapter
from zerodrift.observer.calls import LEAST_PACKED, PAYLOAD, floating
from zerodrift.observer.guard import guarded
from zerodrift.observer.lines import line_of_script
from zerodrift.observer.models import WatchedModel
from zerodrift.observer.observed import name as word
from zerodrift.observer.owners import PLAIN, Owners
from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.patches import Patches
from zerodrift.observer.seen import Column

_PLACE = "ADInplaceOrView"
"""The key of the dispatcher between autograd and the backends."""


class Carriers(Protocol):
    """What a watcher knows of whose memory is whose."""

    active: bool
    thread: int | None
    patches: Patches
    models: list[WatchedModel]
    adapters: tuple[Adapter, ...]
    memory: Owners[WatchedParameter]
    gradient_memory: Owners[WatchedParameter]
    packed: list[list[WatchedParameter]]
    in_backward: int

    def broken(self, error: Exception) -> None: ...
    def moved(self) -> None: ...
    def remember(self) -> None: ...


class WatchedCollectives:
    """Tells whose it is by the memory, by the buckets of DDP, or by the library that packed it."""

    def __init__(self, watcher: Carriers) -> None:
        self._watcher = watcher
        self.unknown: dict[str, int] = {}
        """Reductions and gathers that nobody could tell the parameters of, and how many."""

    def begin(self) -> None:
        for namespace in ("c10d", "_c10d_functional"):
            operations = getattr(torch.ops, namespace)
            library = torch.library.Library(namespace, "IMPL")
            self._watcher.patches.undo(library._destroy)
            for name in PAYLOAD:
                if hasattr(operations, name):
                    operation = getattr(operations, name).default
                    library.impl(operation, self._kernel(name, operation), _PLACE)

    def _kernel(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        watcher = self._watcher

        def issued(*args: Any, **kwargs: Any) -> Any:
            if watcher.in_backward or threading.get_ident() == watcher.thread:
                self._sent(name, args)
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return operation(*args, **kwargs)

        return issued

    @guarded
    def _sent(self, operation: str, args: Any) -> None:
        """A collective that is issued."""
        self._watcher.moved()
        place = PAYLOAD[operation]
        column: Column = "reduce" if "reduce" in operation else "gather"
        summed = "reduce_scatter" if "scatter" in operation else "all_reduce"
        name = "all_gather" if column == "gather" else summed
        for tensor in floating((args[place],), None, also_bytes=column == "gather"):
            if type(tensor) not in PLAIN or torch._is_functional_tensor(tensor):
                continue  # one without values, of code that is being compiled
            for parameter in self._carried(column, tensor):
                wire = parameter.gathered(tensor.dtype) if column == "gather" else word(tensor.dtype)
                if column == "reduce":
                    parameter.reduced += 1
                parameter.seen.see(column, wire, name, "", line_of_script)

    def _carried(self, column: Column, tensor: torch.Tensor) -> Sequence[WatchedParameter]:
        """Whose it is that a collective carries."""
        if self._watcher.packed:
            return self._watcher.packed[-1]
        if column == "gather":
            self._watcher.remember()
        memory = self._watcher.gradient_memory if column == "reduce" else self._watcher.memory
        own = memory.all_of(tensor)
        if own:
            return own
        if tensor.numel() < 2 or not self._watcher.models:
            return ()
        if column == "reduce" and self._watcher.in_backward:
            buckets = self._in_buckets(tensor)
            if buckets:
                return buckets
        for adapter in self._watcher.adapters:
            carried = adapter.carried(column, tensor)
            if carried:
                return carried
        if tensor.dtype.is_floating_point and tensor.numel() >= LEAST_PACKED:
            name = "reductions" if column == "reduce" else "gathers"
            self.unknown[name] = self.unknown.get(name, 0) + 1
        return ()

    def _in_buckets(self, tensor: torch.Tensor) -> list[WatchedParameter]:
        """DDP reduces buckets of parameters of one dtype; a hook on it may have cast them for the wire."""
        trained = [
            p
            for model in self._watcher.models
            if model.replicated
            for p in model.parameters
            if p.seen.trained
        ]
        alike = [p for p in trained if word(tensor.dtype) in p.seen.whats("grad")]
        return alike or trained
