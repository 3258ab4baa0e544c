"""From a tensor to the parameter that it is a view of, or a cast of, by the memory that holds it.

Libraries swap the tensors of a module between its forwards, pack many parameters into one, and free them
again. So a module's parameters are looked up when its forward computes, and memory that was freed belongs to
nobody.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Owner = TypeVar("Owner")


_freed: Any = torch.UntypedStorage._expired  # what `StorageWeakRef.expired` comes to


@dataclass(slots=True)
class _Held(Generic[Owner]):
    """What is in one piece of memory, by where it begins, in elements."""

    memory: StorageWeakRef
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)

    def put(self, begin: int, end: int, owner: Owner) -> bool:
        place = bisect.bisect_left(self.begins, begin)
        if place < len(self.begins) and self.begins[place] == begin:
            if self.ends[place] == end and self.owners[place] is owner:
                return False
            self.ends[place], self.owners[place] = end, owner
            return True
        self.begins.insert(place, begin)
        self.ends.insert(place, end)
        self.owners.insert(place, owner)
        return True

    @property
    def freed(self) -> bool:
        return bool(_freed(self.memory.cdata))

    def at(self, begin: int) -> Owner | None:
        place = bisect.bisect_right(self.begins, begin) - 1
        return self.owners[place] if place >= 0 and begin < self.ends[place] else None


class Owners(Generic[Owner]):
    """Whose memory it is."""

    def __init__(self) -> None:
        self._held: dict[int, _Held[Owner]] = {}

    def put(self, tensor: torch.Tensor, owner: Owner) -> bool:
        """`tensor` is that owner's, as long as its memory is not freed. Returns whether that is new."""
        tensor = local(tensor)
        storage = tensor.untyped_storage()
        begin = int(tensor.storage_offset())
        held = self._held.get(storage._cdata)
        if held is None or held.freed:
            held = self._held[storage._cdata] = _Held(StorageWeakRef(storage))
        return held.put(begin, begin + max(tensor.numel(), 1), owner)

    def of(self, tensor: torch.Tensor) -> Owner | None:
        tensor = local(tensor)
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is None or held.freed:
            return None
        return held.at(int(tensor.storage_offset()))

    def all_of(self, tensor: torch.Tensor) -> list[Owner]:
        """Everyone who has any of its elements."""
        tensor = local(tensor)
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is None or held.freed:
            return []
        begin = int(tensor.storage_offset())
        end = begin + tensor.numel()
        parts = zip(held.begins, held.ends, held.owners, strict=True)
        return [owner for first, last, owner in parts if first < end and begin < last]

    def forget_freed(self) -> None:
        for key in [key for key, held in self._held.items() if held.freed]:
            del self._held[key]


PLAIN = (torch.Tensor, torch.nn.Parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    if type(tensor) in PLAIN:
        return tensor
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor
