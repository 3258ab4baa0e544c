"""Buffers in which gradients accumulate, how they are filled, and their sums by a tree.

Invariants: a buffer is in one pool or in use, never both, and has arbitrary values when it is taken. The tree
of a sum depends only on the number of buffers (`comm/fold.py`), which need not be known before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from zerodrift.comm import carries, leftovers
from zerodrift.dtypes import BLOCK
from zerodrift.kernels import HostBuffers
from zerodrift.plan import Row

CACHED = 1 << 20
"""Bytes of a buffer that stays in a CPU's cache between two passes over it."""


class BufferPool:
    """Flat buffers that segments use in turns."""

    def __init__(self, *, one_size: bool) -> None:
        """On a device, `one_size` drops free buffers when another size is taken. It is for buffers that are
        used briefly, of which the pool would otherwise keep one of every size."""
        self._one_size = one_size
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._on_host = HostBuffers()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer with arbitrary values."""
        if device.type == "cpu":
            return self._on_host.take(numel, dtype)
        free = self._free.get((numel, dtype))
        if free:
            return free.pop()
        if self._one_size:
            self._free.clear()
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, flat: torch.Tensor) -> None:
        if flat.is_cpu:
            self._on_host.give(flat)
        else:
            self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)

    def rest(self) -> None:
        """Drop the free buffers; on a CPU, only if the system runs short of memory."""
        self._free.clear()
        self._on_host.rest()


class GradientBuffers:
    """Pools of the plan's accumulators (`sums`) and of all other buffers of gradients (`spare`)."""

    def __init__(self, *, keep: bool) -> None:
        self.sums = BufferPool(one_size=not keep)
        self.spare = BufferPool(one_size=True)
        self._keep = keep

    def end_step(self) -> None:
        """Drop free buffers; accumulators only if the plan does not keep them."""
        self.spare.rest()
        if not self._keep:
            self.sums.rest()


class LandingLayout:
    """The places of a segment's parameters in a landing buffer, to fill one with gradients."""

    def __init__(self, rows: Sequence[Row], padded: int) -> None:
        self._lengths: list[int] = []
        """Elements of the gap before each parameter and of the parameter, in turn, and of the end."""
        end = 0
        for row in rows:
            self._lengths += [row.offset - end, row.numel]
            end = row.offset + row.numel
        self._lengths.append(padded - end)
        self._gaps: list[torch.Tensor] = []

    def fill(
        self, landing: torch.Tensor, arrived: list[torch.Tensor | None], *, negative_zeros: bool
    ) -> None:
        """Write gradients, and zeros into all other elements. On a CPU, where that is cheap, negative zeros
        become positive ones unless `negative_zeros`."""
        makes_positive = landing.is_cpu and not negative_zeros
        if makes_positive and landing.nbytes > CACHED:
            self._fill_without_negative_zeros(landing, arrived)
            return
        self._gaps = self._gaps or [_zeros(length, landing) for length in self._lengths[:-1:2]]
        pieces = []
        for gap, length, grad in zip(self._gaps, self._lengths[1::2], arrived, strict=True):
            if grad is None:
                pieces += [gap, _zeros(length, landing)]
            else:
                pieces += [gap, dense(grad).reshape(-1)]
        end = landing.numel() - self._lengths[-1]
        torch.cat(pieces, out=landing[:end])
        landing[end:].zero_()
        if makes_positive:
            landing.add_(0.0)

    def _fill_without_negative_zeros(self, landing: torch.Tensor, arrived: list[torch.Tensor | None]) -> None:
        parts = landing.split(self._lengths)
        homes = [home for home, grad in zip(parts[1::2], arrived, strict=True) if grad is not None]
        grads = [dense(grad).reshape(-1) for grad in arrived if grad is not None]
        if homes:
            copy_without_negative_zeros(homes, grads)
        rest = [home for home, grad in zip(parts[1::2], arrived, strict=True) if grad is None]
        torch._foreach_zero_([*parts[::2], *rest])


def copy_without_negative_zeros(homes: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    """Copy gradients of any dtype. See [Note: zeros] of `trained_segment.py`."""
    for home, grad in zip(homes, grads, strict=True):
        own = grad if grad.dtype is home.dtype else grad.to(home.dtype)
        torch.add(own, 0.0, out=home)  # in one pass; -0.0 + 0.0 is 0.0


def dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _zeros(count: int, like: torch.Tensor) -> torch.Tensor:
    few = like.new_zeros(min(count, BLOCK))
    return few if count <= BLOCK else few[:1].expand(count)


class TreeSum:
    """The sum of a rank's micro-batches under `reduce.order: tree`, by the binary tree of `comm/fold.py`. It
    owns the buffers that are added, holds at most log2(m + 1) of m micro-batches, and passes the others to
    `give`."""

    def __init__(self, give: Callable[[torch.Tensor], None]) -> None:
        self._give = give
        self._sums: dict[int, torch.Tensor] = {}
        self.count = 0

    def __bool__(self) -> bool:
        return bool(self.count)

    def add(self, part: torch.Tensor) -> None:
        self._sums[self.count] = part
        self._add(carries(self.count))
        self.count += 1

    @property
    def neighbour(self) -> torch.Tensor | None:
        """The part to which the next one is added first, if that is a single part."""
        return self._sums[self.count - 1] if self.count % 2 else None

    def added(self) -> None:
        """Count a part that was added to `neighbour` in place."""
        self._add(itertools.islice(carries(self.count), 1, None))
        self.count += 1

    def take(self) -> torch.Tensor:
        """Return the whole sum, in the buffer of the first part, and begin anew."""
        self._add(leftovers(self.count))
        self.count = 0
        return self._sums.pop(0)

    def drop(self) -> list[torch.Tensor]:
        """Return the buffers of all partial sums, in the order of their parts, and begin anew."""
        self.count = 0
        held = list(self._sums.values())
        self._sums.clear()
        return held

    def _add(self, pairs: Iterator[tuple[int, int]]) -> None:
        for left, right in pairs:
            part = self._sums.pop(right)
            with torch.no_grad():
                self._sums[left].add_(part)
            self._give(part)
