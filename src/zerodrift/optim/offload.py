"""Master and state in host memory: gradients come down, the update runs there, new storage goes up.

An `Updater` around one whose pieces are in host memory, and which therefore runs the CPU's kernels. Of every
piece the host has an image of storage besides, which the update writes; it is all that goes up, and gradients
are all that comes down. Both go segment by segment: while one is updated, the next one's gradient is on its
way down and the last one's storage on its way up.

Gradients come down into a few buffers that take turns: `AHEAD` of them, and as many more as the inner updater
wants to hold at once (Muon and torch's classes take all before they update any).

Invariant: the bits are those of the same updater on a CPU, whatever is copied when: a gradient is read when
its copy has arrived, and nothing is written that a copy still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zerodrift.optim.statistics import Statistics
from zerodrift.optim.transfers import PendingCopy, Transfers
from zerodrift.optim.updater import Counters, Owned, Updater, Written, no_callback

AHEAD = 2
"""Gradients on their way down or being read, for an updater that takes one after the other."""


class Offloaded:
    """An `Updater` in host memory for pieces on a device."""

    def __init__(
        self,
        owned: Sequence[Owned],
        build: Callable[[Sequence[Owned]], Updater],
        transfers: Transfers,
    ) -> None:
        """`build` makes the updater of pieces in host memory."""
        self._transfers = transfers
        self._there = {piece.number: piece.storage for piece in owned}
        self._here: dict[int, Tensor] = {}
        """The image of every piece's storage."""
        self._going_up: dict[int, PendingCopy] = {}
        self._buffers = HostBuffers(transfers)
        held = [self._brought_down(piece) for piece in owned]
        self._inner = build(held)
        self.groups = self._inner.groups
        self._send_up(list(self._there))

    def _brought_down(self, piece: Owned) -> Owned:
        image = self._transfers.host(piece.storage.numel(), piece.storage.dtype)
        image.copy_(piece.storage)
        self._here[piece.number] = image
        # Without a master of its own a piece's first values are storage itself, and stay so.
        same = piece.initial.dtype is piece.storage.dtype
        return replace(piece, storage=image, initial=image if same else piece.initial.to("cpu", copy=True))

    def leave_alone(self, names: Collection[str]) -> None:
        self._inner.leave_alone(names)

    @torch.no_grad()
    def update(
        self, gradients: Mapping[int, Tensor], multiplier: float, written: Written = no_callback
    ) -> None:
        self._settle()
        self._transfers.begin()
        descending = Descending(gradients, self._buffers, self._transfers)

        def done(number: int) -> None:
            descending.give_back(number)
            self._start_up(number)
            written(number)

        try:
            self._inner.update(descending, multiplier, done)
        finally:
            self._transfers.end()

    def _settle(self) -> None:
        """Nothing reads the images any more: they may be written."""
        for arrival in self._going_up.values():
            arrival.wait()
        self._going_up.clear()

    def _start_up(self, number: int) -> None:
        self._going_up[number] = self._transfers.up(self._there[number], self._here[number])

    def _send_up(self, numbers: Sequence[int]) -> None:
        """Storage follows what was written outside of an update."""
        self._transfers.begin()
        for number in numbers:
            self._start_up(number)
        self._transfers.end()

    # --- values in and out ------------------------------------------------------------------------------

    def master(self, number: int) -> Tensor:
        return self._inner.master(number).to(self._there[number].device)

    @torch.no_grad()
    def set_master(self, number: int, values: Tensor) -> None:
        self._settle()
        self._inner.set_master(number, values.to("cpu"))
        self._send_up([number])

    def states(self, number: int) -> dict[str, Tensor]:
        device = self._there[number].device
        return {name: moment.to(device) for name, moment in self._inner.states(number).items()}

    def set_state(self, number: int, key: str, values: Tensor) -> None:
        self._inner.set_state(number, key, values.to("cpu"))

    @property
    def statistics(self) -> Mapping[int, Statistics]:
        return {
            number: Statistics(room.blocks.to(self._there[number].device))
            for number, room in self._inner.statistics.items()
        }

    # --- what is the same wherever it is ----------------------------------------------------------------

    @property
    def kind(self) -> str:
        return self._inner.kind

    @property
    def group_of(self) -> Mapping[str, int]:
        return self._inner.group_of

    def learning_rates(self) -> tuple[float, ...]:
        return self._inner.learning_rates()

    def counters(self) -> Counters:
        return self._inner.counters()

    def set_counters(self, counters: Counters) -> None:
        self._inner.set_counters(counters)

    def moment_names(self, name: str, counters: Counters) -> tuple[str, ...]:
        return self._inner.moment_names(name, counters)

    def resting(self, number: int) -> tuple[torch.dtype | None, tuple[torch.dtype, ...]]:
        return self._inner.resting(number)


class HostBuffers:
    """Host buffers for gradients, kept from step to step: to lock a page takes longer than to copy to it."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        free = self._free.get((like.numel(), like.dtype))
        return free.pop() if free else self._transfers.host(like.numel(), like.dtype)

    def give(self, buffer: Tensor) -> None:
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


class Descending(Mapping[int, Tensor]):
    """Gradients that come down as they are asked for, and a little ahead of that, in their order."""

    def __init__(self, there: Mapping[int, Tensor], buffers: HostBuffers, transfers: Transfers) -> None:
        self._there = there
        self._buffers = buffers
        self._transfers = transfers
        self._waiting = list(there)
        """Not begun, in order."""
        self._here: dict[int, Tensor] = {}
        """Arrived or on their way."""
        self._arrivals: dict[int, PendingCopy] = {}

    def __getitem__(self, number: int) -> Tensor:
        if number in self._waiting:
            self._begin(number)
        while self._waiting and len(self._here) < AHEAD:
            self._begin(self._waiting[0])
        arrival = self._arrivals.pop(number, None)
        if arrival is not None:
            arrival.wait()
        return self._here[number]

    def _begin(self, number: int) -> None:
        self._waiting.remove(number)
        self._here[number] = self._buffers.take(self._there[number])
        self._arrivals[number] = self._transfers.down(self._here[number], self._there[number])

    def give_back(self, number: int) -> None:
        """The gradient has been used. The next one may come down in its place."""
        self._buffers.give(self._here.pop(number))

    def __contains__(self, number: object) -> bool:
        return number in self._there

    def __iter__(self) -> Iterator[int]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)
