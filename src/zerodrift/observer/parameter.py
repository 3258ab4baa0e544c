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
from zerodrift.observer.seen import Column, Line, SeenParameter


class WatchedParameter:
    """A parameter, the tensor that rests between steps, and what has become of its gradients."""

    def __init__(self, seen: SeenParameter, tensor: torch.Tensor) -> None:
        self.seen = seen
        self.reduced = 0
        self.optimized = False
        self.has_gradient = False
        """Whether an optimizer was given a gradient of it that is not zero."""
        self.sliced = False
        """Whether ranks have slices of it, though no type says so."""
        self.gather_word = ""
        """What it is gathered in, where its library packs several dtypes as bytes."""
        self.samples = Samples(seen.numel)
        self.begin = 0
        """The flat index of the first element that this rank has of it; -1 where it has no range of them."""
        self.rests_in(tensor)
        self._computed_with: Callable[[], torch.Tensor | None] = lambda: None
        self.computed_with: torch.dtype | None = None
        """The dtype of the tensor that its module's forward had last; operations may cast it."""
        self._arrived = self._arrived_before = 0
        self._was_used = False
        self._arrived_in: set[torch.dtype] = set()
        self.computed_in: set[torch.dtype] = set()
        self._numel = seen.numel
        self._first_digest: int | None = None

    @property
    def tensor(self) -> torch.Tensor | None:
        return self._tensor()

    def rests_in(self, tensor: torch.Tensor) -> None:
        self._rested_in: torch.dtype | None = None
        self.hooked = False
        """Whether gradients are seen to arrive at the tensor that rests."""
        self._tensor = weakref.ref(tensor)
        self.begin = _begin(tensor, self.seen)

    def is_resting(self, tensor: torch.Tensor) -> bool:
        return self._tensor() is tensor

    def computes_with(self, tensor: torch.Tensor | None) -> bool:
        """Whether this was it in the last forward of its module."""
        return self._computed_with() is tensor

    def is_computed_with(self, tensor: torch.Tensor) -> bool:
        """A module's forward computes with this tensor; returns whether it was another before."""
        if self._computed_with() is tensor:
            return False
        self._computed_with, self.computed_with = weakref.ref(tensor), tensor.dtype
        return True

    @property
    def is_used_unseen(self) -> bool:
        """Whether it has a gradient, and no operation was seen to use it."""
        return self._arrived > 0 and not self.computed_in

    def look(self) -> bool:
        """What rests. Returns whether its dtype was not seen before."""
        tensor = self._tensor()
        if tensor is None:
            return False
        rests = tensor.__dict__.get("ds_tensor", tensor)  # DeepSpeed's shard of it
        if rests.dtype is self._rested_in:
            return False
        self._rested_in = rests.dtype
        self.seen.see("storage", word(rests.dtype), "the parameter between steps")
        self.seen.layout = "a flat slice on each rank" if self.sliced else _layout(tensor)
        if self._first_digest is None and self.seen.trained:
            self._first_digest = _digest(local(rests))
            if not self.sliced and _varies(local(rests)):
                self.seen.facts["began"] = self._first_digest
        return True

    def gathered(self, dtype: torch.dtype) -> str:
        return (self.gather_word or word(dtype)) if dtype is torch.uint8 else word(dtype)

    def arrives(self, gradient: torch.Tensor, sample: bool, line: Line = line_of_script) -> None:
        """A gradient, at the leaf. `sample` is whether other ranks have one too, to compare with."""
        self._arrived += 1
        if gradient.dtype not in self._arrived_in:
            self._arrived_in.add(gradient.dtype)
            path = self.seen.name.rpartition(".")[0]
            self.seen.see("grad", word(gradient.dtype), "the gradient at the leaf", path, line)
        if not sample:
            self.samples.misses()
        elif gradient.numel() == self._numel > 0 and not gradient.is_sparse:
            self.samples.arrives(gradient)

    def arrived_since_step(self) -> int:
        """Gradients since this was asked last, after a step."""
        since, self._arrived_before = self._arrived - self._arrived_before, self._arrived
        return since

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
        if self.samples.was_given or (since and not self._was_used):
            own, used = self.samples.end()
            self.seen.facts["own"], self.seen.facts["used"] = own, used
            self.has_gradient = any(used)
            self._was_used = any(value is not None for value in used)

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
        if self.is_used_unseen:
            seen.unseen.setdefault("compute", "the operations that used it were not watched")
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
_ROW = 64


def _digest(tensor: torch.Tensor) -> int | None:
    """A number of its bits and their order; None of what has none."""
    if tensor.device.type == "meta" or not tensor.dtype.is_floating_point:
        return None
    flat = tensor.detach().reshape(-1).view(_AS_INTEGERS[tensor.dtype.itemsize])
    total = 0
    for begin in range(0, flat.numel(), _CHUNK):
        total = (31 * total + _sums(flat[begin : begin + _CHUNK])) % (1 << 63)
    return total


def _sums(bits: torch.Tensor) -> int:
    """Of integers, as rows of 64 words of 64 bits: of rows, of columns and of what is left, each weighted by
    where it is. Sums of whole words take a fraction of the time that products of all take."""
    each = 8 // bits.dtype.itemsize
    whole = bits.numel() - bits.numel() % (_ROW * each)
    if bits.storage_offset() % each:
        bits = bits.clone()
    words = bits[:whole].view(torch.int64).view(-1, _ROW)
    left = bits[whole:].to(torch.int64)
    sums = torch.cat([words.sum(1), words.sum(0), left])
    weights = torch.arange(sums.numel(), device=sums.device) * 2654435761 | 1
    return int((sums * weights).sum())


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
