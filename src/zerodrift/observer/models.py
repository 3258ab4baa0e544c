"""The models of a run that is watched: their parameters by name, through every wrapper around them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from zerodrift.observer.modules import (
    all_modules,
    buffers_of,
    class_of,
    identities,
    inside,
    is_compiled,
    leaves_of,
    modules_of,
)
from zerodrift.observer.observed import name as word
from zerodrift.observer.owners import Owners, local
from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.samples import read
from zerodrift.observer.seen import SeenModel, SeenParameter


class WatchedModel:
    """A module whose forward was called, and its parameters under the names that its author gave them."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self.parameters: list[WatchedParameter] = []
        self._paths: dict[int, str] = {}
        self._leaves: dict[int, list[tuple[str, WatchedParameter]]] = {}
        self._by_tensor: dict[int, WatchedParameter] = {}
        self._copies: dict[int, tuple[Any, WatchedParameter | None]] = {}
        self._scanned: list[int] = []
        self._scan()

    def has(self, module: torch.nn.Module) -> bool:
        return id(module) in self._paths

    def path(self, module: torch.nn.Module) -> str:
        return self._paths[id(module)]

    @property
    def wrappers(self) -> tuple[str, ...]:
        """Classes around the model, outermost first."""
        found, module = [], self.root
        while (child := inside(module)) is not None:
            found.append(type(module).__name__)
            module = child
        return tuple(found)

    @property
    def replicated(self) -> bool:
        return "DistributedDataParallel" in self.wrappers

    @property
    def compiled(self) -> bool:
        return any(map(is_compiled, all_modules(self.root)))

    def become(self, larger: WatchedModel) -> None:
        """The same model, seen from a module around it."""
        known = self._by_tensor
        self.root = larger.root
        self._scan(known)

    def leaf(self, module: torch.nn.Module, name: str) -> WatchedParameter | None:
        """The parameter that is this attribute of this module."""
        return next((p for leaf, p in self._leaves.get(id(module), ()) if leaf == name), None)

    def resting(self, tensor: torch.Tensor) -> WatchedParameter | None:
        """The parameter that this tensor is."""
        parameter = self._by_tensor.get(id(tensor))
        return parameter if parameter is not None and parameter.is_resting(tensor) else None

    def copied(self, tensor: torch.Tensor) -> WatchedParameter | None:
        """The parameter that this tensor is a wider copy of, told by its values."""
        known = self._copies.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        copies = [p for p in self.parameters if _is_copy(tensor, p.tensor)]
        parameter = copies[0] if len(copies) == 1 else None
        self._copies[id(tensor)] = (weakref.ref(tensor), parameter)
        return parameter

    def look(self) -> bool:
        """What rests between steps. Returns whether names had to be given anew, or a dtype is another."""
        anew = identities(self.root) != self._scanned
        if anew:
            self._scan(self._by_tensor)
        for parameter in self.parameters:
            anew |= parameter.look()
        return anew

    def remember(self, memory: Owners[WatchedParameter]) -> None:
        """Whose the memory is that rests."""
        for parameter in self.parameters:
            tensor = parameter.tensor
            if tensor is not None and local(tensor).numel():
                memory.put(tensor, parameter)

    def has_others(self, module: torch.nn.Module) -> bool:
        """Whether its forward had other tensors than the one before."""
        leaves = self._leaves.get(id(module))
        if leaves is None:
            return False
        for leaf, parameter in leaves:
            tensor = module.__dict__.get(leaf)
            if tensor is None:
                tensor = module._parameters.get(leaf)
            if not parameter.computes_with(tensor):
                return True
        return False

    def held(self, module: torch.nn.Module) -> Iterator[tuple[WatchedParameter, torch.Tensor]]:
        """The tensors that a module's forward computes with, which a library may have put in its place."""
        for leaf, parameter in self._leaves.get(id(module), ()):
            tensor = module.__dict__.get(leaf)
            if tensor is None:
                tensor = module._parameters.get(leaf)
            if isinstance(tensor, torch.Tensor) and local(tensor).numel():
                yield parameter, tensor

    def stepped(self, since: bool) -> None:
        new = [parameter.samples for parameter in self.parameters if parameter.samples.is_new]
        if new:
            read(new)
        for parameter in self.parameters:
            parameter.stepped(since)

    def seen(self, world: int) -> SeenModel:
        inner = self.root
        while (child := inside(inner)) is not None:
            inner = child
        buffers = {
            path: word(buffer.dtype)
            for path, buffer in buffers_of(self.root)
            if buffer.is_floating_point() and buffer.numel() > 0
        }
        ties = getattr(getattr(inner, "config", None), "tie_word_embeddings", None)
        return SeenModel(
            name=class_of(inner).__name__,
            parameters=[parameter.end(world) for parameter in self.parameters],
            buffers=buffers,
            trained=any(parameter.optimized for parameter in self.parameters),
            wrappers=self.wrappers,
            ties=ties if isinstance(ties, bool) else None,
        )

    def _scan(self, known: dict[int, WatchedParameter] | None = None) -> None:
        """Name everything, keeping what was seen of tensors and of names that are still there."""
        known = known or {}
        names = {parameter.seen.name: parameter for parameter in self.parameters}
        self.parameters, self._leaves, self._by_tensor = [], {}, {}
        self._paths = {id(module): path for path, module in modules_of(self.root)}
        for leaf in leaves_of(self.root):
            module, tensor = leaf.module, leaf.tensor
            name = f"{leaf.path}.{leaf.name}" if leaf.path else leaf.name
            parameter = None if leaf.packed else self._by_tensor.get(id(tensor))
            if parameter is not None:
                if name != parameter.seen.name and name not in parameter.seen.also:
                    parameter.seen.also += (name,)
            else:
                parameter = (None if leaf.packed else known.get(id(tensor))) or names.get(name)
                if parameter is None:
                    kind = f"{class_of(module).__module__}.{class_of(module).__qualname__}"
                    seen = SeenParameter(name, leaf.shape, kind, tensor.requires_grad)
                    parameter = WatchedParameter(seen, tensor)
                parameter.seen.name = name
                parameter.seen.trained |= tensor.requires_grad
                parameter.sliced = leaf.sliced
                parameter.rests_in(tensor)
                if not leaf.packed:
                    self._by_tensor[id(tensor)] = parameter
                self.parameters.append(parameter)
            self._leaves.setdefault(id(module), []).append((leaf.name, parameter))
        self._scanned = identities(self.root)


def _is_copy(tensor: torch.Tensor, parameter: torch.Tensor | None) -> bool:
    """Whether a parameter is this tensor, rounded."""
    if parameter is None or parameter is tensor or tensor.shape != parameter.shape:
        return False
    if tensor.device != parameter.device or tensor.dtype == parameter.dtype:
        return False
    return bool(torch.equal(tensor.detach().to(parameter.dtype), parameter.detach()))
