"""The files that a run writes while it is watched: which dtype a parameter has in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from zerodrift.observer.imports import when_imported
from zerodrift.observer.lines import line_of_script
from zerodrift.observer.models import WatchedModel
from zerodrift.observer.observed import name as word
from zerodrift.observer.patches import Patches

_DEEP = 4
"""Levels of dicts that a checkpoint may be."""


class Exports:
    """What was written, by the names in the files."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[tuple[int, ...], str, str, str]] = {}
        """Name -> shape, dtype, what wrote it, line."""
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
            for name, tensor in _named(tensors, _DEEP):
                self._written[name] = (tuple(tensor.shape), word(tensor.dtype), by, line)
            return original(tensors, *args, **kwargs)

        return save

    def see(self, models: Iterable[WatchedModel]) -> None:
        """A name in a file may have something before it, or lack what a wrapper put there."""
        for model in models:
            for parameter in model.parameters:
                for name in (parameter.seen.name, *parameter.seen.also):
                    for written, (shape, dtype, by, line) in self._written.items():
                        same = written == name or written.endswith("." + name) or name.endswith("." + written)
                        if same and shape == parameter.seen.shape:
                            parameter.seen.see("export", dtype, by, "", line)
                            parameter.seen.unseen.pop("export", None)


def _named(value: Any, deep: int) -> Iterator[tuple[str, torch.Tensor]]:
    if not isinstance(value, dict) or deep == 0:
        return
    for key, item in value.items():
        if isinstance(item, torch.Tensor):
            if isinstance(key, str) and item.is_floating_point():
                yield key, item
        else:
            yield from _named(item, deep - 1)
