"""Where the buffers of gradients come from and go to.

A segment takes a buffer when gradients land in it and gives it back when they are reduced or forgotten; which
of them stay for the next step is the plan's to say.

Invariant: a buffer is in one pool or in use, never both; what is in it when it is taken is anything.
"""

from __future__ import annotations

import torch


class BufferPool:
    """Flat buffers that segments of one size take turns in, because fresh memory costs a page fault per
    4 KiB: as much as what is then done with it."""

    def __init__(self, *, one_size: bool) -> None:
        """With `one_size`, what is free is let go of as soon as another size is asked for: for buffers that
        are full for a moment only, of which there would be one for every size there is."""
        self._one_size = one_size
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer with anything in it."""
        free = self._free.get((numel, dtype))
        if free:
            return free.pop()
        if self._one_size:
            self._free.clear()
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, flat: torch.Tensor) -> None:
        self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)

    def clear(self) -> None:
        self._free.clear()


class GradientBuffers:
    """The plan's accumulators, and all other buffers of gradients."""

    def __init__(self, *, keep: bool) -> None:
        self.sums = BufferPool(one_size=not keep)
        self.spare = BufferPool(one_size=True)
        self._keep = keep

    def end_step(self) -> None:
        """Spare memory goes back, and the accumulators' too unless the plan keeps it."""
        self.spare.clear()
        if not self._keep:
            self.sums.clear()
