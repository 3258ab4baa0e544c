"""One parameter of a watched run: its memory, samples of its gradients, and its record.

Libraries swap the tensors of a module between its forwards, pack many parameters into one tensor, and free
tensors again. So a tensor is matched with a parameter by its memory, until that is freed.
"""

from __future__ import annotations

import bisect
import operator
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerodrift.inspect.trace.operations import line_of_script
from zerodrift.inspect.trace.records import Column, ParameterRecord, dtype_name, narrow_name

Owner = TypeVar("Owner")

PLAIN = (torch.Tensor, torch.nn.Parameter)

_FIRST = operator.itemgetter(0)
_is_freed: Any = torch.UntypedStorage._expired  # what `StorageWeakRef.expired` calls


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor below the wrappers that transforms of `torch.func` put around it."""
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, and any other tensor without wrappers of `torch.func`."""
    if type(tensor) in PLAIN:
        return unwrapped(tensor)
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


class Owners(Generic[Owner]):
    """Maps a tensor to the owner of its memory."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[StorageWeakRef, list[tuple[int, int, Owner]]]] = {}
        """Key of a storage -> the storage, and ranges of its elements by begin: begin, end, owner."""
        self._most = 64  # number of storages beyond which freed ones are dropped

    def put(self, tensor: torch.Tensor, owner: Owner) -> bool:
        """Give a tensor's memory to an owner until it is freed; return True if the owner is new."""
        tensor = local(tensor)
        begin = int(tensor.storage_offset())
        return self.put_range(tensor.untyped_storage(), begin, begin + max(tensor.numel(), 1), owner)

    def put_range(self, storage: torch.UntypedStorage, begin: int, end: int, owner: Owner) -> bool:
        """Give a range of elements to an owner, in a storage that may have no memory now."""
        ranges = self._ranges(storage)
        if not ranges:
            if len(self._held) > self._most:
                self._held = {key: held for key, held in self._held.items() if not _is_freed(held[0].cdata)}
                self._most = 64 + 2 * len(self._held)
            self._held[storage._cdata] = (StorageWeakRef(storage), ranges)
        place = bisect.bisect_left(ranges, begin, key=_FIRST)
        if place == len(ranges) or ranges[place][0] != begin:
            ranges.insert(place, (begin, end, owner))
            return True
        (_, last, before), ranges[place] = ranges[place], (begin, end, owner)
        return last != end or before is not owner

    def _ranges(self, storage: torch.UntypedStorage) -> list[tuple[int, int, Owner]]:
        held = self._held.get(storage._cdata)
        return [] if held is None or _is_freed(held[0].cdata) else held[1]

    def of(self, tensor: torch.Tensor) -> Owner | None:
        tensor = local(tensor)
        ranges, begin = self._ranges(tensor.untyped_storage()), tensor.storage_offset()
        place = bisect.bisect_right(ranges, begin, key=_FIRST)
        if not place:
            return None
        _, end, owner = ranges[place - 1]
        return owner if begin < end else None

    def all_of(self, tensor: torch.Tensor) -> list[Owner]:
        """Return every owner of any of its elements."""
        return [owner for _, _, owner in self.ranges_of(tensor)]

    def ranges_of(self, tensor: torch.Tensor) -> list[tuple[int, int, Owner]]:
        """Return the begin, end and owner of ranges of its elements, counted from the first one."""
        tensor = local(tensor)
        begin, numel = int(tensor.storage_offset()), tensor.numel()
        return [
            (max(first - begin, 0), min(last - begin, numel), owner)
            for first, last, owner in self._ranges(tensor.untyped_storage())
            if first < begin + numel and begin < last
        ]


class Samples:
    """A few elements of each gradient: as it arrives on a rank, and as an optimizer gets it.

    Elements are copied on their device and read when the step is over, so that no device waits.
    """

    def __init__(self, numel: int) -> None:
        self.places = range(0, max(numel, 1), max(1, -(-numel // 8)))
        self._arrived: list[torch.Tensor] = []
        self.used: list[tuple[range, torch.Tensor]] = []  # numbers of elements, and their values
        self.missed = False  # whether a gradient was not sampled

    def arrives(self, gradient: torch.Tensor) -> None:
        self._arrived.append(_elements(gradient, self.places))

    def given(self, gradient: torch.Tensor, begin: int, at: int, length: int) -> None:
        """Sample an optimizer's gradient, whose place `at` has the parameter's element `begin`."""
        if gradient.is_sparse or begin < 0 or not gradient.is_floating_point():
            return
        step, length = self.places.step, gradient.numel() - at if length < 0 else length
        numbers = range(len(self.places))[-(-begin // step) : -(-(begin + length) // step)]
        if numbers:
            first = self.places[numbers.start] - begin + at
            places = range(first, first + (len(numbers) - 1) * step + 1, step)
            self.used.append((numbers, _elements(gradient, places)))

    def end(self) -> tuple[list[float], list[float | None]]:
        """Return the sum of arrived gradients (empty if one was missed) and the last given one; reset."""
        own = [0.0] * len(self.places)
        if self._arrived:
            own = torch.stack(self._arrived).cpu().double().sum(0).tolist()
        used: list[float | None] = [None] * len(self.places)
        for numbers, values in self.used:
            used[numbers.start : numbers.stop] = values.tolist()
        own = [] if self.missed else own
        self._arrived, self.used, self.missed = [], [], False
        return own, used


def sample(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return at least so many evenly spaced elements of this rank's part, as a view where that can be."""
    flat = local(tensor).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // count)]


def _elements(tensor: torch.Tensor, places: range) -> torch.Tensor:
    flat = local(tensor).detach().reshape(-1)
    return flat[places.start : places.stop : places.step].to(torch.float32, copy=True)


class LiveParameter:
    """A parameter: the tensor that holds it between steps, its gradients, and its record."""

    def __init__(self, record: ParameterRecord, tensor: torch.Tensor) -> None:
        self.record = record
        self.optimized = False
        self.has_gradient = False  # whether an optimizer was given a gradient of it that is not zero
        self.is_sliced = False  # whether ranks have slices of it, though its type does not say so
        self.gather_dtype = ""
        """The dtype that it is gathered in, if its library packs several dtypes as bytes."""
        self.samples = Samples(record.numel)
        self.begin = 0  # flat index of this rank's first element; -1 if its elements are no range
        self.rests_in(tensor)
        self.computed_with: Callable[[], torch.Tensor | None] = lambda: None
        """Returns the tensor of its module's last forward."""
        self.compute_dtype: torch.dtype | None = None  # dtype of that tensor; operations may cast it
        self.computed_in: set[torch.dtype] = set()
        self.is_written = False  # whether the script was seen to copy a master into it
        self.is_drawn = False  # whether it was rounded at random
        self.residue = ""  # the optimizer's state that keeps what its rounding lost
        self.arrived = self._arrived_before = 0  # gradients of it that arrived
        self._was_used = False
        self._first_digest: int | None = None
        self._looked_at = self.tensor  # returns the tensor of that digest

    def rests_in(self, tensor: torch.Tensor) -> None:
        """Set the tensor that holds the parameter between steps, without keeping it alive."""
        self._rested_in: torch.dtype | None = None
        self.is_hooked = False  # whether gradients of that tensor are hooked
        self.tensor: Callable[[], torch.Tensor | None] = weakref.ref(tensor)
        self.begin = _begin(tensor, self.record)

    def computes_with(self, tensor: torch.Tensor) -> bool:
        """Set the tensor of a forward; return True if it changed."""
        if self.computed_with() is tensor:
            return False
        self.computed_with, self.compute_dtype = weakref.ref(tensor), tensor.dtype
        return True

    @property
    def gradient(self) -> torch.Tensor | None:
        """The `.grad` of the tensor that holds the parameter between steps; None for a result."""
        tensor = self.tensor()
        return tensor.grad if tensor is not None and tensor.is_leaf else None

    @property
    def is_used_unseen(self) -> bool:
        """Whether it has a gradient, and no operation was seen to use it."""
        return self.arrived > 0 and not self.computed_in

    def look(self, may_be_tied: bool = False) -> bool:
        """Record the tensor between steps; return True if its dtype changed."""
        tensor = self.tensor()
        if tensor is None:
            return False
        rests = tensor.__dict__.get("ds_tensor", tensor)  # DeepSpeed's shard of it
        if rests.dtype is self._rested_in:
            return False
        record, self._rested_in = self.record, rests.dtype
        record.add("storage", narrow_name(rests) or dtype_name(rests.dtype), "the parameter between steps")
        record.layout = "a flat slice on each rank" if self.is_sliced else _layout(tensor)
        if self._first_digest is None and record.trained:
            values = local(rests).detach()
            self._first_digest, self._looked_at = _digest(values), self.tensor
            if not self.is_sliced and values.dim() > 1 and values.numel() and self._first_digest is not None:
                least, greatest = values.aminmax()
                if least < greatest:  # a constant identifies no tensor
                    rounded = values.bfloat16() if may_be_tied else values  # a cast may have untied it
                    record.facts["began"] = _digest(rounded)
        return True

    def arrives(self, gradient: torch.Tensor, sample: bool) -> None:
        """Record a gradient at the leaf, and sample it to compare it with what an optimizer is given."""
        self.arrived += 1
        path, dtype = self.record.name.rpartition(".")[0], dtype_name(gradient.dtype)
        self.record.add("grad", dtype, "the gradient at the leaf", path, line_of_script)
        if sample and _is_whole(gradient, self.record.numel):
            self.samples.arrives(gradient)
        else:
            self.samples.missed = True

    def arrived_since_step(self) -> int:
        since, self._arrived_before = self.arrived - self._arrived_before, self.arrived
        return since

    def stepped(self, since: bool) -> None:
        """Attribute the gradients that arrived to the step that used them.

        If only other ranks use them, they belong to the step that was counted `since` the last call.
        """
        if self.samples.used or (since and not self._was_used):
            own, used = self.samples.end()
            self.record.facts["own"], self.record.facts["used"] = own, used
            self.has_gradient = any(used)
            self._was_used = any(value is not None for value in used)

    def end(self, world: int) -> ParameterRecord:
        """Return the record, with a reason for every empty cell."""
        record, tensor = self.record, self.tensor()
        record.facts |= {"optimized": self.optimized, "gradients": self.arrived, "drawn": self.is_drawn}
        rests = getattr(tensor, "ds_tensor", tensor)
        if isinstance(rests, torch.Tensor) and self._first_digest is not None:
            last = _digest(local(rests))
            if last != self._first_digest or self._looked_at() is tensor:
                record.facts["changed"] = last != self._first_digest
            if not record.layout:
                record.facts["digest"] = last
        if self.is_used_unseen:
            record.unseen.setdefault("compute", "the operations that used it were not watched")
        for column, reason in _reasons(record, world, self.optimized).items():
            record.unseen.setdefault(column, reason)
        record.unseen = {column: why for column, why in record.unseen.items() if not record.cells.get(column)}
        return record


def _is_whole(gradient: torch.Tensor, numel: int) -> bool:
    """Return True for a gradient of so many real elements, all of which this rank has."""
    return not gradient.is_sparse and gradient.is_floating_point() and local(gradient).numel() == numel


def _layout(tensor: torch.Tensor) -> str:
    placements = getattr(tensor, "placements", None)
    if placements is None or all(placement.is_replicate() for placement in placements):
        return ""
    mesh: Any = getattr(tensor, "device_mesh", None)
    dims = sorted({placement.dim for placement in placements if placement.is_shard()})
    return f"sharded on dim {', '.join(map(str, dims))} over {mesh.size()} ranks"


def _begin(tensor: torch.Tensor, record: ParameterRecord) -> int:
    """Return the flat index of this rank's first element; -1 if its elements are no range."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh: Any = getattr(tensor, "device_mesh", None)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if any(offsets[1:]):
        return -1
    return offsets[0] * (record.numel // max(record.shape[0], 1)) if offsets else 0


_AS_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def _digest(tensor: torch.Tensor) -> int | None:
    """Return a checksum of the bits and their order; None for a tensor without floating values.

    The sums of rows and columns of 64 words of 64 bits are weighted by place, which takes a fraction of the
    time of weighting every word.
    """
    if tensor.device.type == "meta" or not tensor.dtype.is_floating_point:
        return None
    each, total = 8 // tensor.dtype.itemsize, 0
    for bits in tensor.detach().reshape(-1).view(_AS_INTEGERS[tensor.dtype.itemsize]).split(1 << 20):
        whole = bits.numel() - bits.numel() % (64 * each)
        bits = bits.clone() if bits.storage_offset() % each else bits
        words = bits[:whole].view(torch.int64).view(-1, 64)
        sums = torch.cat([words.sum(1), words.sum(0), bits[whole:].to(torch.int64)])
        weights = torch.arange(sums.numel(), device=sums.device) * 2654435761 | 1
        total = (31 * total + int((sums * weights).sum())) % (1 << 63)
    return total


def _reasons(record: ParameterRecord, world: int, is_optimized: bool) -> dict[Column, str]:
    """Return, for each column, why its cell would be empty."""
    alone = "one process" if world == 1 else ""
    frozen = "" if record.trained else "it is not trained"
    no_gradient = frozen or "no gradient arrived in the observed steps"
    no_optimizer = frozen or "no optimizer that took a step has it"
    return {
        "storage": "it was never between steps",
        "gather": alone or ("none was seen" if record.layout else "each rank has all of it"),
        "compute": "no operation used it in the observed steps",
        "grad": no_gradient,
        "accumulate": no_gradient,
        "reduce": frozen or alone or "no collective is known to have carried its gradient",
        "master": no_optimizer,
        "state": "none is kept" if is_optimized else no_optimizer,
        "export": "no file with it was written in the observed steps",
    }
