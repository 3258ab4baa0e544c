"""Where the buffers of gradients come from and go to.

A segment takes a buffer when gradients land in it and gives it back when they are reduced or forgotten; which
of them stay for the next step is the plan's to say.

Invariant: a buffer is in one pool or in use, never both, and nobody has to read it any more when it is taken;
what is in it then is anything.
"""

from __future__ import annotations

import torch

from zerodrift.comm.collectives import Collectives


class BufferPool:
    """Flat buffers that segments of one size take turns in, because fresh memory costs a page fault per
    4 KiB: as much as what is then done with it."""

    def __init__(self, comm: Collectives, *, one_size: bool, sent: bool) -> None:
        """With `one_size`, what is free is let go of as soon as another size is asked for: for buffers that
        are full for a moment only, of which there would be one for every size there is. What is `sent` is
        memory that others may read, and comes back when they have."""
        self._comm = comm
        self._one_size = one_size
        self._sent = sent
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer with anything in it."""
        free = self._free.get((numel, dtype), [])
        for number, buffer in enumerate(free):
            if not self._sent or self._comm.is_read(buffer):
                return free.pop(number)
        if self._one_size and not free:
            self._free.clear()
        if self._sent:
            return self._comm.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self._comm.mesh.device)

    def give(self, flat: torch.Tensor) -> None:
        self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)

    def clear(self) -> None:
        self._free.clear()


class GradientBuffers:
    """The plan's accumulators, and all other buffers of gradients."""

    def __init__(self, comm: Collectives, *, keep: bool) -> None:
        self.sums = BufferPool(comm, one_size=not keep, sent=False)
        self.spare = BufferPool(comm, one_size=True, sent=True)
        self._keep = keep

    def end_step(self) -> None:
        """Spare memory goes back, and the accumulators' too unless the plan keeps it."""
        self.spare.clear()
        if not self._keep:
            self.sums.clear()
