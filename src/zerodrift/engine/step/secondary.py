"""A second copy of a segment's gathered values, held by few neighbouring ranks, for gathers in a backward.

A forward gathers over all ranks of the shard axis, and every rank keeps its part of what arrived. A backward
gathers the parts, which between the ranks of one node takes no link between nodes: hpZ of ZeRO++, and
`reshard_after_forward` of `fully_shard` with a number. Kept is what the model computes with, packed if it
travels packed, so a backward has the bits of its forward. An evaluation keeps nothing.

Invariant: `is_current` has the same value on all ranks, because only a gather that all of them take part in
sets it, and only a change of values on all of them clears it.
"""

from __future__ import annotations

import torch

from zerodrift.comm import AxisName, Collectives, Handle
from zerodrift.engine.step.narrow_wire import start_narrow_gather
from zerodrift.kernels import host_memory
from zerodrift.plan import Segment


class SecondaryCopy:
    """This rank's part of the second copy of a segment."""

    def __init__(self, comm: Collectives, spec: Segment, axis: AxisName, label: str) -> None:
        self._comm = comm
        self._spec = spec
        self._axis = comm.mesh.axis(axis)
        self._label = label
        dtype, numel = spec.columns.regather, spec.padded // self._axis.size
        self._wire = dtype if dtype.format is not None else None
        length = numel if self._wire is None else dtype.nbytes(numel)
        self._part = host_memory.zeros(length, dtype.torch, comm.mesh.device)
        self.is_current = False

    @property
    def dtype(self) -> torch.dtype:
        return self._part.dtype

    @torch.no_grad()
    def keep(self, gathered: torch.Tensor) -> None:
        """Keep this rank's part of what all ranks have gathered, as values or packed."""
        self._part.copy_(self._axis.slice(gathered, self._axis.rank))
        self.is_current = True

    def start_gather(self, out: torch.Tensor) -> Handle:
        """Begin to gather the parts into `out`, which gets what `keep` was given."""
        axis, numel = self._axis.name, self._spec.padded
        if self._wire is not None:
            return start_narrow_gather(self._comm, out, self._part, numel, self._wire, axis, self._label)
        return self._comm.start_all_gather(out, self._part, axis, self._label)
