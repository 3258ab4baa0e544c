"""The step of a slice by Triton programs: tensors handed over, and what only a device needs.

`kernels/programs.py` has the arithmetic, `kernels/device.py` the launch. Statistics are taken from the same
pass: it leaves the change that was wanted, and `account` counts on the device, some blocks at a time because
it needs room for what was before.

Invariant: statistics change no bit of the update.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.kernels import device
from zerodrift.kernels.probe import contraction
from zerodrift.optim import blockwise, kinds
from zerodrift.optim.reference import UpdateStep, check_step
from zerodrift.optim.rounding import step_key
from zerodrift.optim.schemes import Scheme, SliceTensors, read, read_moment
from zerodrift.optim.statistics import Statistics, account

COUNTED_BLOCKS = 1 << 15
"""At once, with statistics: eight million elements, for which some 400 MB are borrowed."""


def update_on_device(
    scheme: Scheme, of: SliceTensors, gradient: Tensor, step: UpdateStep, statistics: Statistics | None = None
) -> None:
    """Update a slice from its gradient (fp32, bf16 or fp16), which is left as it is."""
    check_step(scheme, of, gradient, step)
    table = kinds.table(step, of.storage.device)
    if statistics is None:
        _launch(scheme, of, gradient, step, table)
        return
    for first, last in _chunks(of):
        part = _blocks(of, first, last)
        grad = gradient[first * BLOCK : first * BLOCK + part.numel]
        wanted = torch.empty_like(grad, dtype=torch.float32)
        before = (read(scheme, part), part.storage.clone(), grad)
        _launch(scheme, part, grad, step, table, wanted)
        moment = read_moment(scheme, part, len(part.moments) - 1) if part.moments else None
        account(statistics.blocks[first:last], wanted, before, (read(scheme, part), part.storage, moment))


def _launch(
    scheme: Scheme,
    of: SliceTensors,
    gradient: Tensor,
    step: UpdateStep,
    table: Tensor,
    wanted: Tensor | None = None,
) -> None:
    device.update(
        device.UpdateTensors(
            numel=of.numel,
            stochastic=step_key(step.number),
            grad=gradient,
            storage=of.storage,
            master=of.master,
            moments=of.moments,
            scales=of.scales,
            codes=blockwise.tables(of.storage.device) if of.scales else None,
            groups=of.groups,
            keys=of.keys if scheme.state.drawn and of.moments else None,
            table=table,
            wanted=wanted,
            master_kind=kinds.MASTERS[scheme.master],
            state_kind=kinds.state(scheme, of),
            algorithm=kinds.algorithm(step),
            contraction=contraction(),
        )
    )


def _chunks(of: SliceTensors) -> Iterator[tuple[int, int]]:
    for first in range(0, of.blocks, COUNTED_BLOCKS):
        yield first, min(first + COUNTED_BLOCKS, of.blocks)


def _blocks(of: SliceTensors, first: int, last: int) -> SliceTensors:
    """Blocks [first, last) of a slice, in the same memory."""
    elements, blocks = slice(first * BLOCK, min(last * BLOCK, of.numel)), slice(first, last)
    return SliceTensors(
        storage=of.storage[elements],
        master=None if of.master is None else of.master[elements],
        moments=tuple(moment[elements] for moment in of.moments),
        scales=tuple(scale[blocks] for scale in of.scales),
        groups=None if of.groups is None else of.groups[blocks],
        keys=None if of.keys is None else of.keys[blocks],
    )
