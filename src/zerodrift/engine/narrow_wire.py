"""The narrow wire: gradients that travel as packed runs of bytes, and the feedback of their rounding.

A rank encodes what it sends, and decodes every part of a sum to fp32. Nothing is rounded again on the way, so
a sum depends on the values and the order of ranks alone. Collectives are recorded with the format and the
number of elements, as the plan lists them.

Invariant: a gradient is encoded once. With feedback, the sent gradient plus the new feedback is the gradient
plus the old feedback, to the rounding of fp32. Random bits depend on the parameter, the element, the step,
the number of the encoding within the step, and the rank alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerodrift.comm import AxisName, Collectives, Handle, Recorded, Sum
from zerodrift.dtypes import DType, from_torch
from zerodrift.kernels import narrow
from zerodrift.mesh import MOST_RANKS
from zerodrift.policy import Reduction

_ENCODINGS = 1 << 20
"""More than a step has encodings of one segment."""


class NarrowWire:
    """Encodes the gradients of one segment on this rank."""

    def __init__(self, reduce: Reduction, rank: int, keys: torch.Tensor | None) -> None:
        """`keys` are random keys of the segment's blocks for stochastic rounding. Shape [padded / BLOCK],
        int64."""
        self.dtype = reduce.wire
        self.rank = rank
        self._keeps = reduce.feedback
        self._keys = keys
        self._steps: Callable[[], int]
        self._last = (-1, 0)
        """(step of the last encoding, its number in that step)."""
        self.feedback: torch.Tensor | None = None
        """The part of this rank's gradients that rounding has lost. Shape [padded], fp32."""

    def follow(self, steps: Callable[[], int]) -> None:
        """Let random bits depend on `steps()`, the number of earlier steps, skipped ones included."""
        self._steps = steps

    @torch.no_grad()
    def encode(self, flat: torch.Tensor, before: float, runs: int) -> torch.Tensor:
        """Return a gradient, divided by `before` in place, as packed runs."""
        if before != 1.0:
            flat.div_(before)
        if self.feedback is not None:
            flat.add_(self.feedback)
        draws = None
        if self._keys is not None:
            step, last = self._steps(), self._last
            self._last = (step, last[1] + 1 if step == last[0] else 0)
            draws = self._draws(self._keys, *self._last)
        packed = narrow.encode_runs(self.dtype, flat, runs, draws)
        if self._keeps:
            self._keep(flat, packed, runs)
        return packed

    def encode_slice(self, flat: torch.Tensor, number: int, slices: int) -> torch.Tensor:
        """Return slice `number` of a sum over ranks as one packed run, the same at each call of a step."""
        draws = None
        if self._keys is not None:
            draws = self._draws(self._keys, self._steps(), _ENCODINGS - 1).split(slices)[number]
        return narrow.encode_runs(self.dtype, flat, 1, draws)

    def _draws(self, keys: torch.Tensor, step: int, number: int) -> narrow.Draws:
        return narrow.Draws(keys, (step * _ENCODINGS + number) * MOST_RANKS + self.rank)

    def _keep(self, flat: torch.Tensor, packed: torch.Tensor, runs: int) -> None:
        """Keep what rounding has lost; zeros for values that are not finite, whose step is skipped."""
        if self.feedback is None:
            self.feedback = torch.empty_like(flat)
        narrow.decode_runs(self.dtype, packed, self.feedback, runs)
        torch.sub(flat, self.feedback, out=self.feedback)
        self.feedback.nan_to_num_(0.0, 0.0, 0.0)


def start_narrow_sum(
    comm: Collectives, out: torch.Tensor, packed: torch.Tensor, wire: DType, axis: AxisName, how: Sum, of: str
) -> Handle:
    """Start a reduce-scatter of `packed`, a run for each rank, into this rank's slice of the sum."""
    ranks = comm.mesh.size(axis)
    note = Recorded("reduce_scatter", wire, out.numel() * ranks, axis, from_torch(how.dtype))
    rows, ones = packed.view(ranks, -1), [1] * ranks
    arrived, under_way = comm.start_all_to_all(rows, ones, ones, axis, of, note)

    def finish() -> None:
        under_way.wait()
        fold_narrow(out, arrived, wire, how)

    return Handle(finish)


def sum_narrow_replicas(
    comm: Collectives, out: torch.Tensor, packed: torch.Tensor, wire: DType, how: Sum, of: str
) -> None:
    """Write the sum of every replica's run into `out` of each."""
    parts = packed.new_empty(comm.mesh.size("replicate"), packed.numel())
    note = Recorded("all_reduce", wire, out.numel(), "replicate", from_torch(how.dtype))
    comm.start_all_gather(parts.view(-1), packed, "replicate", of, note).wait()
    fold_narrow(out, parts, wire, how)


@torch.no_grad()
def fold_narrow(out: torch.Tensor, parts: torch.Tensor, wire: DType, how: Sum) -> None:
    """Write the sum of packed parts to `out`, each decoded to fp32, in the order of ranks.

    Shape of the parts: [ranks, bytes], uint8.
    """
    if how.dtype is not torch.float32 or how.order != "rank":
        raise AssertionError(f"parts in {wire} are added in fp32 and in the order of ranks, not as {how}")
    total = out if out.dtype is torch.float32 and not how.add else torch.empty_like(out, dtype=torch.float32)
    for number, part in enumerate(parts):
        narrow.decode(wire, part, total, add=number > 0)
    if total is not out:
        _ = out.add_(total) if how.add else out.copy_(total)
