"""A few elements of each gradient: what arrives on a rank, beside what an optimizer is given.

Elements are taken when a gradient passes by, and read when a step is over, all at once: a device is waited
for no more often than that.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from zerodrift.observer.owners import local

COUNT = 8
"""Elements that are taken of a parameter, at most."""


class Samples:
    """Of one parameter's gradients."""

    def __init__(self, numel: int) -> None:
        self.places = range(0, max(numel, 1), max(1, -(-numel // COUNT)))
        """Flat indices of the elements."""
        self._arrived: list[torch.Tensor] = []
        self._given: list[tuple[range, torch.Tensor]] = []
        """Numbers of elements, and their values."""
        self._own = [0.0] * len(self.places)
        self._used: list[float | None] = [None] * len(self.places)
        self._missed = False
        self.was_given = False
        """Whether an optimizer has some of it, since the last end."""

    def arrives(self, gradient: torch.Tensor) -> None:
        """A gradient of all of it."""
        self._arrived.append(_taken(gradient, self.places))

    def misses(self) -> None:
        """A gradient that is not looked at."""
        self._missed = True

    def given(self, gradient: torch.Tensor, begin: int, at: int, length: int) -> None:
        """What an optimizer has of it: elements from `begin`, at `at` of a flat gradient."""
        step = self.places.step
        numbers = range(len(self.places))[-(-begin // step) : -(-(begin + length) // step)]
        if numbers:
            first = self.places[numbers.start] - begin + at
            places = range(first, first + (len(numbers) - 1) * step + 1, step)
            self._given.append((numbers, _taken(gradient, places)))
            self.was_given = True

    def end(self) -> tuple[list[float], list[float | None]]:
        """The sums of what arrived, none where some was missed, and the last that was given; begins anew."""
        own, used = [] if self._missed else self._own, self._used
        self._missed = self.was_given = False
        self._own, self._used = [0.0] * len(self.places), [None] * len(self.places)
        return own, used

    @property
    def is_new(self) -> bool:
        """Whether elements were taken that were not read."""
        return bool(self._arrived or self._given)


def read(samples: Sequence[Samples]) -> None:
    """Their elements to numbers."""
    taken = [tensor for one in samples for tensor in (*one._arrived, *(given for _, given in one._given))]
    values = {
        device: iter(torch.cat([tensor for tensor in taken if tensor.device == device]).tolist())
        for device in {tensor.device for tensor in taken}
    }
    for one in samples:
        for tensor in one._arrived:
            one._own = [own + next(values[tensor.device]) for own in one._own]
        for numbers, tensor in one._given:
            for number in numbers:
                one._used[number] = next(values[tensor.device])
        one._arrived, one._given = [], []


def _taken(tensor: torch.Tensor, places: range) -> torch.Tensor:
    """Some elements by flat index, without a copy of a tensor that is not contiguous."""
    tensor = local(tensor).detach()
    if tensor.is_contiguous():
        first = tensor.storage_offset() + places.start
        return tensor.as_strided((len(places),), (places.step,), first).to(torch.float32, copy=True)
    return tensor[_where(tensor.shape, places, tensor.device)].float()


@functools.lru_cache(maxsize=1 << 12)
def _where(shape: torch.Size, flat: range, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Flat indices as one index per dimension."""
    index: list[Any] = []
    rest = list(flat)
    for length in reversed(shape):
        index.append(torch.tensor([place % length for place in rest], device=device))
        rest = [place // length for place in rest]
    return tuple(reversed(index))
