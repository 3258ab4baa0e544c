"""Whether gradients are clipped while the loss scale is in them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from zerodrift.observer.lines import line_of_script
from zerodrift.observer.patches import Patches


class Clips(Protocol):
    """A watcher, to whom a clip is told."""

    patches: Patches
    active: bool
    thread: int | None

    def event(self, kind: str, line: str, **rest: Any) -> None: ...


class WatchedScale:
    """Of torch's `GradScaler`, beside torch's functions that clip."""

    def __init__(self, watcher: Clips) -> None:
        self._watcher = watcher
        self._scaled = False

    def begin(self) -> None:
        patch = self._watcher.patches.replace
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                patch(module, name, self._clips)
        patch(torch.amp.GradScaler, "scale", self._scales)
        for name in ("unscale_", "update"):
            patch(torch.amp.GradScaler, name, self._unscales)

    def _clips(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._watcher.active and self._scaled and threading.get_ident() == self._watcher.thread:
            self._watcher.event("clipped_scaled", line_of_script())
        return original(*args, **kwargs)

    def _scales(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._scaled = bool(scaler.is_enabled())
        return original(scaler, *args, **kwargs)

    def _unscales(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._scaled = False
        return original(scaler, *args, **kwargs)
