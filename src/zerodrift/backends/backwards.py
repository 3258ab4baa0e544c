"""Through the groups, forward and back: which backward is reduced, and in which order groups were used.

The counterpart of `engine/grads.py`, as far as torch leaves it to us: torch reduces in the order of its own
hooks, so a model must use its groups in the same order on every rank. A checksum of that order travels
with the norm, and a difference is an error.

Invariant: the switches of every group are set before anything of a backward is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerodrift.backends.group import LiveGroup
from zerodrift.engine.grads import BackwardCallbacks


class Passes:
    """The forwards and backwards of one engine."""

    def __init__(self, groups: Sequence[LiveGroup], keep: bool) -> None:
        self._groups = groups
        self._keep = keep
        """Whether a gathered group stays for all micro-batches of a step."""
        self._running = False
        self._began = False
        self.checksum = 0
        """Of the groups that were used, in their order; the engine clears it in every step."""
        self.callbacks: BackwardCallbacks | None = None

    # --- what groups tell -------------------------------------------------------------------------------

    def forward_begins(self, group: LiveGroup) -> None:
        if self._running and self.callbacks is not None:
            # autograd drops its callbacks when a backward raises, so only the next forward tells.
            self.callbacks.failed()
        self._began = True
        # Below 2^40, so that a sum over ranks stays far below 2^63.
        self.checksum = (self.checksum * 1_000_003 + group.number + 1) % (1 << 40)

    def begin(self) -> None:
        if self._running:
            return
        self._running = True
        last = self.callbacks is None or self.callbacks.is_last()
        for group in self._groups:
            group.open(last, self._keep and not last)
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """Before torch's own callback, which reduces the groups whose inputs needed no gradient."""
        self._running = False
        for group in self._groups:
            group.fill()
        if self.callbacks is not None:
            self.callbacks.ended()

    # --- the step ---------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Reduce, in order, whatever was not."""
        for group in self._groups:
            group.flush()
        for group in self._groups:
            group.sum_over_replicas()

    def abort(self) -> bool:
        """A forward or a backward was ended by an exception. Returns whether torch may have to be told: it
        knows nothing before the first forward."""
        self._running = False
        return self._began

    def drop(self) -> None:
        self.abort()
        for group in self._groups:
            group.drop_gradients()
