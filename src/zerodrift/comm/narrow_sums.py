"""Gathers and sums of values that travel in a narrow format, as packed runs of bytes.

What is sent is encoded before; a sum decodes every part to fp32 where it arrives. Nothing is rounded again on
the way, so a sum depends on the values and the order of ranks alone.

Invariant: a call is recorded with the format and the elements that the runs hold, as the plan lists it.
"""

from __future__ import annotations

import torch

from zerodrift.comm.collectives import Collectives, Handle, Recorded
from zerodrift.comm.fold import Sum
from zerodrift.comm.mesh import AxisName
from zerodrift.dtypes import DType, from_torch
from zerodrift.kernels import narrow


def start_narrow_gather(
    comm: Collectives,
    packed: torch.Tensor,
    own: torch.Tensor,
    numel: int,
    wire: DType,
    axis: AxisName,
    of: str,
) -> Handle:
    """Start to gather every rank's run, of `numel` elements all together, into `packed`."""
    return comm.start_all_gather(packed, own, axis, of, Recorded("all_gather", wire, numel, axis, None))


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


def narrow_all_reduce(
    comm: Collectives, out: torch.Tensor, packed: torch.Tensor, wire: DType, axis: AxisName, how: Sum, of: str
) -> None:
    """Write the sum of every rank's run into every rank's `out`."""
    parts = packed.new_empty(comm.mesh.size(axis), packed.numel())
    note = Recorded("all_reduce", wire, out.numel(), axis, from_torch(how.dtype))
    comm.start_all_gather(parts.view(-1), packed, axis, of, note).wait()
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
