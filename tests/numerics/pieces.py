"""Slices of a plan for each rank's optimizer, without ranks.

Tests of updaters run every rank of a plan in turn, in one process.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zerodrift.optim.updater import Owned
from zerodrift.plan.table import Plan

Values = Mapping[str, torch.Tensor]
"""Values by the name of a row, in its shape."""


def flat(plan: Plan, number: int, values: Values, rank: int) -> torch.Tensor:
    """Return a rank's part of a segment filled with values, in fp32."""
    segment = plan.segments[number]
    whole = torch.zeros(segment.padded)
    for row in (plan.rows[index] for index in segment.rows):
        whole[row.offset : row.offset + row.numel] = values[row.name].reshape(-1)
    update = segment.columns.update
    if update is None or not update.axis:
        return whole
    each = segment.padded // plan.mesh.shard
    return whole[rank * each : (rank + 1) * each].clone()


def owned(plan: Plan, values: Values, rank: int) -> list[Owned]:
    """Return the slices that `rank` owns of a model with these values."""
    found = []
    for number, segment in enumerate(plan.segments):
        update = segment.columns.update
        if update is None:
            continue
        initial = flat(plan, number, values, rank)
        start = rank * initial.numel() if initial.numel() < segment.padded else 0
        storage = initial.to(segment.columns.storage.dtype.torch)
        rows = tuple(plan.rows[index] for index in segment.rows)
        found.append(Owned(number, segment, update, rows, storage, initial, start))
    return found


def gathered(plan: Plan, parts: list[Mapping[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return full values by name, from each rank's flat pieces by segment number."""
    found = {}
    for number, segment in enumerate(plan.segments):
        update = segment.columns.update
        if update is None:
            continue
        whole = parts[0][number]
        if whole.numel() < segment.padded:
            whole = torch.cat([part[number] for part in parts])
        for row in (plan.rows[index] for index in segment.rows):
            found[row.name] = whole[row.offset : row.offset + row.numel].view(row.shape).clone()
    return found
