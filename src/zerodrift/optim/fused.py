"""The step of a slice by the fastest available code: compiled on a CPU, Triton on a GPU, or the reference.

`engine/step/update.py` decides for all ranks of a run whether to use this file. `updates` defines the
arithmetic, which `kernels/native.cpp` and `kernels/programs.py` repeat; `kernels/device.py` launches the
latter. This file makes the checks that compiled code cannot make, and passes tensors and numbers to it. With
statistics, Triton's programs write the wanted change, which `account` counts some blocks at a time.

Invariant: both paths on a CPU and a GPU's programs give the same bits, except that any NaN may stand for
another. [Note: bits on a GPU] has the one other exception.

[Note: bits on a GPU] The reference on a GPU uses torch's kernels, which fuse and order a few operations
differently than on a CPU (`addcdiv` multiplies after it divides), so it may differ by an ulp from the
programs, and from itself on a CPU. `Root.TORCH` is a correctly rounded root on a GPU, as torch's is.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.kernels import contraction, device, native, step_key, vector_root
from zerodrift.optim import rounding
from zerodrift.optim.schemes import SliceTensors, read, read_moment
from zerodrift.optim.updates import (
    ARITHMETIC,
    Coefficients,
    Root,
    UpdateStep,
    account,
    check_gradient,
    reference_update,
)
from zerodrift.policy import Master, State

UpdateFunction = Callable[[SliceTensors, Tensor, UpdateStep, Tensor | None], None]
"""A function that steps a slice: `update`, or the reference."""

# `native.cpp`, with its headers, and `kernels/programs.py` know the same numbers.
MASTERS = {Master.FP32: 0, Master.SPLIT: 1, Master.SAME: 2}
STATES = {State.FP32: 0, State.BF16: 1, State.BF16_STOCHASTIC: 2, State.EIGHT_BIT: 3}

COUNTED_BLOCKS = 1 << 15
"""Blocks per launch with statistics: eight million elements, which need some 400 MB."""

CPU = torch.device("cpu")

_log = logging.getLogger("zerodrift")


def update(of: SliceTensors, gradient: Tensor, step: UpdateStep, statistics: Tensor | None = None) -> None:
    """Update a slice from its gradient (fp32, bf16 or fp16), which is left as it is."""
    gradient, where = gradient.contiguous(), of.storage.device
    library = compiled_for(where, step)
    if library is not None:
        if of.numel:
            _update_compiled(library, of, gradient, step, statistics)
    elif ARITHMETIC[step.algorithm].compiled is not None and device.works(where):
        if of.numel:
            update_on_device(of, gradient, step, statistics)
    else:
        reference_update(of, gradient, step, statistics)


def compiled_for(where: torch.device, step: UpdateStep) -> native.Library | None:
    """Return the compiled CPU kernels if they can run this step on this device."""
    if where.type != "cpu" or ARITHMETIC[step.algorithm].compiled is None:
        return None
    if _needs_torch_root(step) and vector_root() is None:
        _warn_of_roots()
        return None
    return native.library()


def _needs_torch_root(step: UpdateStep) -> bool:
    return step.root is Root.TORCH and ARITHMETIC[step.algorithm].roots


@functools.cache
def _warn_of_roots() -> None:
    _log.warning(
        "zerodrift: this torch's square root cannot be called from compiled code; updates that must equal "
        "`torch.optim` bit for bit run in plain PyTorch"
    )


# --- compiled, on a CPU -----------------------------------------------------------------------------------


class _Update(ctypes.Structure):
    """`struct Update` of native.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("numel", "stochastic")),
        *((name, ctypes.c_void_p) for name in ("grad", "storage", "master", "moment1", "moment2")),
        *((name, ctypes.c_void_p) for name in ("scale1", "scale2", "codes", "groups", "keys")),
        *((name, ctypes.c_void_p) for name in ("table", "root", "statistics")),
        *((name, ctypes.c_int32) for name in ("grad_type", "storage_type", "master_kind")),
        *((name, ctypes.c_int32) for name in ("state_kind", "algorithm", "threads")),
    )


def _update_compiled(
    library: native.Library, of: SliceTensors, gradient: Tensor, step: UpdateStep, statistics: Tensor | None
) -> None:
    check_gradient(of, gradient)
    if of.groups is not None:
        least, most = map(int, torch.aminmax(of.groups))
        if least < 0 or most >= len(step.hypers):
            raise AssertionError(f"groups must be in [0, {len(step.hypers)}): {least} to {most}")
    table, root = coefficient_table(step), vector_root() if _needs_torch_root(step) else None
    tensors = (gradient, of.storage, *_others(of), of.groups, of.keys, table)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    call = _Update(
        of.numel,
        step_key(step.number),
        *addresses,
        root,
        None if statistics is None else statistics.data_ptr(),
        native.TYPES[gradient.dtype],
        native.TYPES[of.storage.dtype],
        *_kinds(of, step).values(),
        torch.get_num_threads(),
    )
    library.update(ctypes.addressof(call))


# --- Triton, on a GPU -------------------------------------------------------------------------------------


def update_on_device(
    of: SliceTensors, gradient: Tensor, step: UpdateStep, statistics: Tensor | None = None
) -> None:
    """Update a slice from its gradient (fp32, bf16 or fp16), which is left as it is."""
    check_gradient(of, gradient)
    table = coefficient_table(step, of.storage.device)
    if statistics is None:
        _launch(of, gradient, step, table)
        return
    for first in range(0, of.blocks, COUNTED_BLOCKS):
        last = min(first + COUNTED_BLOCKS, of.blocks)
        part = _blocks(of, first, last)
        grad = gradient[first * BLOCK : first * BLOCK + part.numel]
        wanted = torch.empty_like(grad, dtype=torch.float32)
        before = (read(part), part.storage.clone(), grad)
        _launch(part, grad, step, table, wanted)
        moment = read_moment(part, len(part.moments) - 1) if part.moments else None
        account(statistics[first:last], wanted, before, (read(part), part.storage, moment))


def _launch(
    of: SliceTensors, gradient: Tensor, step: UpdateStep, table: Tensor, wanted: Tensor | None = None
) -> None:
    once, keys = contraction(), of.keys if of.scheme.state.drawn and of.moments else None
    device.update(
        of.storage,
        (gradient, *_others(of), of.groups, keys, table, wanted),
        step_key(step.number),
        fma_add=once.add,
        fma_addcmul=once.addcmul,
        fma_lerp=once.lerp,
        **_kinds(of, step),
    )


def _blocks(of: SliceTensors, first: int, last: int) -> SliceTensors:
    """Return blocks [first, last) of a slice, in the same memory."""
    elements, blocks = slice(first * BLOCK, min(last * BLOCK, of.numel)), slice(first, last)
    return SliceTensors(
        of.scheme,
        storage=of.storage[elements],
        master=None if of.master is None else of.master[elements],
        moments=tuple(moment[elements] for moment in of.moments),
        scales=tuple(scale[blocks] for scale in of.scales),
        groups=None if of.groups is None else of.groups[blocks],
        keys=None if of.keys is None else of.keys[blocks],
    )


# --- what both are given ------------------------------------------------------------------------------------


def _others(of: SliceTensors) -> tuple[Tensor | None, ...]:
    """Return the master, two moments, their two scales and the codes of scales, or None for each."""
    moments, scales = (*of.moments, None, None)[:2], (*of.scales, None, None)[:2]
    return (of.master, *moments, *scales, rounding.tables(of.storage.device) if of.scales else None)


def _kinds(of: SliceTensors, step: UpdateStep) -> dict[str, int]:
    """Return the choices that are made once per slice, as numbers."""
    algorithm = ARITHMETIC[step.algorithm].compiled
    assert algorithm is not None, f"{step.algorithm} has no compiled update"
    # A slice without moments has no scales or codes to read, whatever its column says.
    state = STATES[of.scheme.state if of.moments else State.FP32]
    return {"master_kind": MASTERS[of.scheme.master], "state": state, "algorithm": algorithm}


@functools.lru_cache(maxsize=2)
def coefficient_table(step: UpdateStep, device: torch.device = CPU) -> Tensor:
    """Return a row of fp32 coefficients per group, made once per step and not per slice. Read it only.

    The sign includes the multiplier.
    """
    fields = tuple(Coefficients.__dataclass_fields__)
    groups = [ARITHMETIC[step.algorithm].coefficients(hyper) for hyper in step.hypers]
    rows = [[getattr(group, field) for field in fields] for group in groups]
    table = torch.tensor(rows, dtype=torch.float32, device=CPU)
    table[:, 0] *= torch.tensor(step.multiplier, dtype=torch.float32, device=CPU)
    if device.type == "cpu":
        return table
    # Through pinned memory, so that the host does not wait for the device.
    return table.pin_memory().to(device, non_blocking=True)
