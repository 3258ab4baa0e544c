"""One parameter of a run that is watched, and what has become of its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from zerodrift.observer.lines import line_of_script
from zerodrift.observer.observed import name as word
from zerodrift.observer.owners import local
from zerodrift.observer.samples import Samples
from zerodrift.observer.seen import Column, SeenParameter


class WatchedParameter:
    """A parameter, the tensor that rests between steps, and what has become of its gradients."""

    def __init__(self, seen: SeenParameter, tensor: torch.Tensor) -> None:
        self.seen = seen
        self.reduced = 0
        self.optimized = False
        self.sliced = False
        """Whether ranks have slices of it, though no type says so."""
        self.gather_word = ""
        """What it is gathered in, where its library packs several dtypes as bytes."""
        self.samples = Samples(seen.numel)
        self.begin = 0
        """The flat index of the first element that this rank has of it; -1 where it has no range of them."""
        self.rests_in(tensor)
        self._computed_with: Callable[[], torch.Tensor | None] = lambda: None
        self._arrived = 0
        self._arrived_in: set[torch.dtype] = set()
        self.computed_in: set[torch.dtype] = set()
        self._numel = seen.numel
        self._first_digest: int | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether an optimizer was given a gradient of it that is not zero."""
        return any(self.seen.facts.get("used", ()))

    @property
    def tensor(self) -> torch.Tensor | None:
        return self._tensor()

    def rests_in(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self.begin = _begin(tensor, self.seen)

    def is_resting(self, tensor: torch.Tensor) -> bool:
        return self._tensor() is tensor

    def is_computed_with(self, tensor: torch.Tensor) -> bool:
        """A module's forward computes with this tensor; returns whether it was another before."""
        if self._computed_with() is tensor:
            return False
        self._computed_with = weakref.ref(tensor)
        return True

    def look(self) -> None:
        """What rests."""
        tensor = self._tensor()
        if tensor is None:
            return
        rests = getattr(tensor, "ds_tensor", tensor)  # DeepSpeed's shard of it
        self.seen.see("storage", word(rests.dtype), "the parameter between steps")
        self.seen.layout = "a flat slice on each rank" if self.sliced else _layout(tensor)
        if self._first_digest is None and self.seen.trained:
            self._first_digest = _digest(local(rests))
            if not self.sliced and _varies(local(rests)):
                self.seen.facts["began"] = self._first_digest

    def gathered(self, dtype: torch.dtype) -> str:
        return (self.gather_word or word(dtype)) if dtype is torch.uint8 else word(dtype)

    def arrives(self, gradient: torch.Tensor, sample: bool) -> None:
        """A gradient, at the leaf. `sample` is whether other ranks have one too, to compare with."""
        self._arrived += 1
        if gradient.dtype not in self._arrived_in:
            self._arrived_in.add(gradient.dtype)
            path = self.seen.name.rpartition(".")[0]
            self.seen.see("grad", word(gradient.dtype), "the gradient at the leaf", path, line_of_script)
        if not sample:
            self.samples.misses()
        elif gradient.numel() == self._numel > 0 and not gradient.is_sparse:
            self.samples.arrives(gradient)

    def used(self, gradient: torch.Tensor, begin: int, at: int, length: int) -> None:
        """What an optimizer was given of it: elements from `begin`, at `at` of a flat gradient."""
        if not gradient.is_sparse and begin >= 0:
            self.samples.given(gradient, begin, at, gradient.numel() - at if length < 0 else length)

    def began(self, master: torch.Tensor, at: int, length: int) -> None:
        """Whether the master holds nothing that storage would not hold; asked once, before its first step."""
        if "master_rounded" in self.seen.facts or not self.seen.whats("storage"):
            return
        storage = getattr(torch, self.seen.whats("storage")[0])
        if not master.is_floating_point() or master.dtype.itemsize <= storage.itemsize:
            return
        flat = master.detach().reshape(-1)[at:]
        flat = flat[:length] if length >= 0 else flat
        self.seen.facts["master_rounded"] = bool(torch.equal(flat.to(storage).to(flat.dtype), flat))

    def stepped(self, since: bool) -> None:
        """What an optimizer was given belongs to what had arrived. Where only other ranks are given it, what
        had arrived here belongs to theirs, once there was a step `since`."""
        never = all(value is None for value in self.seen.facts.get("used", ()))
        if self.samples.was_given or (since and never):
            self.seen.facts["own"], self.seen.facts["used"] = self.samples.end()

    def end(self, world: int) -> SeenParameter:
        """What was seen, with a reason for every cell that was not."""
        seen, tensor = self.seen, self._tensor()
        rests = getattr(tensor, "ds_tensor", tensor)
        seen.facts |= {
            "optimized": self.optimized,
            "gradients": self._arrived,
            "reductions": self.reduced,
        }
        if tensor is not None and isinstance(rests, torch.Tensor) and self._first_digest is not None:
            last = _digest(local(rests))
            seen.facts["changed"] = last != self._first_digest
            if not seen.layout:
                seen.facts["digest"] = last
        for column, reason in _reasons(seen, world, self.optimized).items():
            if not seen.cells.get(column):
                seen.unseen.setdefault(column, reason)
        seen.unseen = {column: why for column, why in seen.unseen.items() if not seen.cells.get(column)}
        return seen


def _layout(tensor: torch.Tensor) -> str:
    """How it is spread over ranks."""
    placements = getattr(tensor, "placements", None)
    if placements is not None and not all(placement.is_replicate() for placement in placements):
        mesh: Any = getattr(tensor, "device_mesh", None)
        dims = sorted({placement.dim for placement in placements if placement.is_shard()})
        return f"sharded on dim {', '.join(map(str, dims))} over {mesh.size()} ranks"
    return ""


def _begin(tensor: torch.Tensor, seen: SeenParameter) -> int:
    """The flat index of the first element that this rank has of it; -1 where it has no range of them."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh: Any = getattr(tensor, "device_mesh", None)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if any(offsets[1:]):
        return -1
    return offsets[0] * (seen.numel // max(seen.shape[0], 1)) if offsets else 0


def _varies(tensor: torch.Tensor) -> bool:
    """Whether it has values that say whose they are: no vector, no constant."""
    if tensor.dim() < 2 or not tensor.numel() or tensor.device.type == "meta":
        return False
    least, greatest = tensor.detach().aminmax()
    return bool(least < greatest)


_AS_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_CHUNK = 1 << 20


def _digest(tensor: torch.Tensor) -> int | None:
    """A number of its bits and their order; None of what has none."""
    if tensor.device.type == "meta" or not tensor.dtype.is_floating_point:
        return None
    bits = tensor.detach().reshape(-1).view(_AS_INTEGERS[tensor.dtype.itemsize])
    total = 0
    for begin in range(0, bits.numel(), _CHUNK):
        chunk = bits[begin : begin + _CHUNK].to(torch.int64)
        weights = torch.arange(begin, begin + chunk.numel(), device=chunk.device) * 2654435761 + 1
        total ^= int((chunk * (weights | 1)).sum()) + begin
    return total


def _reasons(seen: SeenParameter, world: int, optimized: bool) -> dict[Column, str]:
    """Why a cell would be empty."""
    whole = "one process" if world == 1 else "each rank has all of it" if not seen.layout else "none was seen"
    none = "" if seen.trained else "it is not trained"
    no_gradient = none or "no gradient arrived in the observed steps"
    return {
        "storage": "it was never between steps",
        "gather": whole,
        "compute": "no operation used it in the observed steps",
        "grad": no_gradient,
        "accumulate": no_gradient,
        "reduce": none or ("one process" if world == 1 else "no collective carried its gradient"),
        "master": none or "no optimizer that took a step has it",
        "state": none or "no optimizer that took a step has it" if not optimized else "none is kept",
        "export": "no file with it was written in the observed steps",
    }
