"""Gradients of a run that is watched: what arrives at leaves, and what it is added to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from zerodrift.observer.guard import guarded
from zerodrift.observer.lines import LineOfCall
from zerodrift.observer.models import WatchedModel
from zerodrift.observer.observed import name as word
from zerodrift.observer.owners import Owners, local
from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.patches import Patches


class GradientsWatcher(Protocol):
    """What a watcher does for them."""

    active: bool
    several: bool
    thread: int | None
    in_backward: int
    models: list[WatchedModel]
    patches: Patches
    gradient_memory: Owners[WatchedParameter]

    def broken(self, error: Exception) -> None: ...
    def backward_begins(self) -> None: ...


class WatchedGradients:
    """Of leaves: tensors that modules compute with, and parameters that rest."""

    def __init__(self, watcher: GradientsWatcher) -> None:
        self._watcher = watcher
        self.passes = 0
        """Backward passes that there have been."""
        self._line = LineOfCall()
        """Of the one that is under way."""

    def begin(self) -> None:
        for name in ("backward", "grad"):
            self._watcher.patches.replace(torch.autograd, name, self._backward)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watcher = self._watcher
        if not watcher.active or threading.get_ident() != watcher.thread:
            return original(*args, **kwargs)
        if not watcher.in_backward:
            self._begins()
        watcher.in_backward += 1
        try:
            return original(*args, **kwargs)
        finally:
            watcher.in_backward -= 1

    @guarded
    def _begins(self) -> None:
        self.passes += 1
        self._line = LineOfCall()
        self._watcher.backward_begins()
        for model in self._watcher.models:
            for parameter in model.parameters:
                if parameter.seen.trained and not parameter.hooked:
                    tensor = parameter.tensor
                    if tensor is not None:
                        self.hook(parameter, tensor)
                        parameter.hooked = tensor.requires_grad

    def hook(self, parameter: WatchedParameter, leaf: torch.Tensor) -> None:
        """See gradients arrive at a leaf. The tensor that a module computes with may not be the one that
        rests in it."""
        if not leaf.requires_grad or not leaf.is_leaf or getattr(leaf, "_zerodrift_watched", False):
            return
        if hasattr(leaf, "_shard_param_infos"):
            return  # FSDP's adapter sees the gradients of what is packed in it
        leaf._zerodrift_watched = True  # type: ignore[attr-defined]
        holder, watcher = weakref.ref(leaf), self._watcher

        def arrives(gradient: torch.Tensor) -> None:
            if watcher.active and not torch.compiler.is_compiling():
                try:
                    parameter.arrives(gradient, watcher.several, self._line)
                    tensor = holder()
                    if tensor is not None and tensor.grad is not None:
                        self._adds(parameter, tensor.grad)
                except Exception as error:
                    watcher.broken(error)

        def accumulated(tensor: torch.Tensor) -> None:
            if watcher.several:
                self._accumulated(parameter, tensor.grad)

        def forget() -> None:
            tensor = holder()
            if tensor is not None:
                del tensor._zerodrift_watched  # type: ignore[attr-defined]

        patches = self._watcher.patches
        patches.undo(leaf.register_hook(arrives).remove)
        patches.undo(leaf.register_post_accumulate_grad_hook(accumulated).remove)
        patches.undo(forget)

    def _adds(self, parameter: WatchedParameter, held: torch.Tensor) -> None:
        """A gradient is added to one that is there."""
        if parameter.seen.has("accumulate", word(held.dtype)):
            return
        if local(held).any():  # and not zeros, as DeepSpeed's BF16_Optimizer leaves them
            parameter.seen.see("accumulate", word(held.dtype), ".grad", "", self._line)

    @guarded
    def _accumulated(self, parameter: WatchedParameter, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._watcher.gradient_memory.put(gradient, parameter)
