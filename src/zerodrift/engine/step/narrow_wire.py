"""The narrow wire of a trained segment: its gradients as packed runs, and what rounding them has lost.

Invariant: a gradient is encoded once. With feedback, what is sent plus what is kept is the gradient plus what
was kept before, to the rounding of fp32. Random bits depend on the parameter, the element, the step, the
number of the encoding within the step, and the rank alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerodrift.kernels import narrow
from zerodrift.mesh import MOST_RANKS
from zerodrift.policy import Reduction

_ENCODINGS = 1 << 20
"""More than a step has encodings of one segment."""


class NarrowWire:
    """Encodes the gradients of one segment on this rank."""

    def __init__(self, reduce: Reduction, rank: int) -> None:
        self.dtype = reduce.wire
        self.rank = rank
        self._keeps = reduce.feedback
        self.keys: torch.Tensor | None = None
        """Random keys of the segment's blocks, where codes are drawn. Shape [padded / BLOCK], int64."""
        self.step: Callable[[], int] = lambda: 0
        """Returns the number of steps before this one, with those that were skipped."""
        self._last = (-1, 0)
        """The step of the last encoding, and its number in that step."""
        self.feedback: torch.Tensor | None = None
        """The part of this rank's gradients that encoding has lost. Shape [padded], fp32."""

    @torch.no_grad()
    def encode(self, flat: torch.Tensor, before: float, runs: int) -> torch.Tensor:
        """Return a gradient, divided by `before` in place, as packed runs."""
        if before != 1.0:
            flat.div_(before)
        if self.feedback is not None:
            flat.add_(self.feedback)
        packed = narrow.encode_runs(self.dtype, flat, runs, self._next_draws())
        if self._keeps:
            self._keep(flat, packed, runs)
        return packed

    def encode_slice(self, flat: torch.Tensor, number: int, slices: int) -> torch.Tensor:
        """Return slice `number` of a sum over ranks as one packed run, the same at each call of a step."""
        draws = None if self.keys is None else self._draws(self.step(), _ENCODINGS - 1).split(slices)[number]
        return narrow.encode_runs(self.dtype, flat, 1, draws)

    def _next_draws(self) -> narrow.Draws | None:
        """Return what the next encoding of gradients draws from; None where it rounds to nearest."""
        if self.keys is None:
            return None
        step, last = self.step(), self._last
        self._last = (step, last[1] + 1 if step == last[0] else 0)
        return self._draws(*self._last)

    def _draws(self, step: int, number: int) -> narrow.Draws:
        if self.keys is None:
            raise AssertionError("a wire that rounds to nearest draws nothing")
        return narrow.Draws(self.keys, (step * _ENCODINGS + number) * MOST_RANKS + self.rank)

    def _keep(self, flat: torch.Tensor, packed: torch.Tensor, runs: int) -> None:
        """Keep what encoding has lost; nothing of blocks that are not finite, whose step is not taken."""
        if self.feedback is None:
            self.feedback = torch.empty_like(flat)
        narrow.decode_runs(self.dtype, packed, self.feedback, runs)
        torch.sub(flat, self.feedback, out=self.feedback)
        self.feedback.nan_to_num_(0.0, 0.0, 0.0)
