"""The narrow wire of a trained segment: its gradients as packed runs, and what rounding them has lost.

Invariant: a gradient is encoded once. With feedback, what is sent plus what is kept is the gradient plus what
was kept before, to the rounding of fp32.
"""

from __future__ import annotations

import torch

from zerodrift.dtypes import DType
from zerodrift.kernels import narrow


class NarrowWire:
    """Encodes the gradients of one segment on this rank."""

    def __init__(self, dtype: DType, keeps: bool) -> None:
        self.dtype = dtype
        self._keeps = keeps
        self.feedback: torch.Tensor | None = None
        """The part of this rank's gradients that encoding has lost. Shape [padded], fp32."""

    @torch.no_grad()
    def encode(self, flat: torch.Tensor, before: float, runs: int) -> torch.Tensor:
        """Return a gradient, divided by `before` in place, as packed runs."""
        if before != 1.0:
            flat.div_(before)
        if self.feedback is not None:
            flat.add_(self.feedback)
        packed = narrow.encode_runs(self.dtype, flat, runs)
        if self._keeps:
            self._keep(flat, packed, runs)
        return packed

    def _keep(self, flat: torch.Tensor, packed: torch.Tensor, runs: int) -> None:
        """Keep what encoding has lost; nothing of blocks that are not finite, whose step is not taken."""
        if self.feedback is None:
            self.feedback = torch.empty_like(flat)
        narrow.decode_runs(self.dtype, packed, self.feedback, runs)
        torch.sub(flat, self.feedback, out=self.feedback)
        self.feedback.nan_to_num_(0.0, 0.0, 0.0)
