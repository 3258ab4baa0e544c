"""The step of a slice, as fast as there is a way: one compiled pass over memory, or the reference.

Chooses the path by where the slice lies: `kernels/native.cpp` on a CPU, Triton's programs (`optim/device.py`)
on a GPU, the reference where neither can be built; `engine/step/update.py` decides for all ranks of a run
whether to come here. For the first it checks what compiled code cannot, and hands addresses over. The
arithmetic is defined by `updates` and `reference`, which the others repeat.

Invariant: on a CPU both paths leave the same bits, and a GPU's programs leave them too. (The bits of a NaN
are the one exception: any NaN equals any other.) See [Note: bits on a GPU] for what is left.

[Note: bits on a GPU] The reference on a GPU is torch's own kernels there, which contract and order a few
operations otherwise than those on a CPU (`addcdiv` multiplies after it divides), so it may differ by an ulp
from the programs, and from itself on a CPU. `Root.TORCH` is a correctly rounded root on a GPU, as torch's is.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from zerodrift.kernels import device, native
from zerodrift.kernels.probe import vector_root
from zerodrift.optim import blockwise, kinds
from zerodrift.optim.device import update_on_device
from zerodrift.optim.reference import UpdateStep, check_step, reference_update
from zerodrift.optim.rounding import step_key
from zerodrift.optim.schemes import Scheme, SliceTensors
from zerodrift.optim.statistics import Statistics
from zerodrift.optim.updates import ARITHMETIC, Root

UpdateFunction = Callable[[Scheme, SliceTensors, Tensor, UpdateStep, Statistics | None], None]
"""How a slice is stepped: `update`, or the reference."""

_log = logging.getLogger("zerodrift")


class _Update(ctypes.Structure):
    """`struct Update` of native.cpp, field by field."""

    _fields_ = (
        ("numel", ctypes.c_int64),
        ("stochastic", ctypes.c_int64),
        ("grad", ctypes.c_void_p),
        ("storage", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("moment1", ctypes.c_void_p),
        ("moment2", ctypes.c_void_p),
        ("scale1", ctypes.c_void_p),
        ("scale2", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("root", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("grad_type", ctypes.c_int32),
        ("storage_type", ctypes.c_int32),
        ("master_kind", ctypes.c_int32),
        ("state_kind", ctypes.c_int32),
        ("algorithm", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


def update(
    scheme: Scheme, of: SliceTensors, gradient: Tensor, step: UpdateStep, statistics: Statistics | None = None
) -> None:
    """Update a slice from its gradient (fp32, bf16 or fp16), which is left as it is."""
    gradient = gradient.contiguous()
    built = compiled_for(of.storage.device, step)
    if built is not None:
        if of.numel:
            _update_compiled(built, scheme, of, gradient, step, statistics)
    elif ARITHMETIC[step.algorithm].compiled is not None and device.works(of.storage.device):
        if of.numel:
            update_on_device(scheme, of, gradient, step, statistics)
    else:
        reference_update(scheme, of, gradient, step, statistics)


def compiled_for(where: torch.device, step: UpdateStep) -> native.Library | None:
    """The compiled CPU kernels, where they can run this step on this device."""
    if where.type != "cpu" or ARITHMETIC[step.algorithm].compiled is None:
        return None
    if _needs_torch_root(step) and vector_root() is None:
        _tell_once_about_roots()
        return None
    return native.library()


def _needs_torch_root(step: UpdateStep) -> bool:
    return step.root is Root.TORCH and ARITHMETIC[step.algorithm].roots


@functools.cache
def _tell_once_about_roots() -> None:
    _log.warning(
        "zerodrift: this torch's square root cannot be called from compiled code; updates that must equal "
        "`torch.optim` bit for bit run in plain PyTorch"
    )


def _update_compiled(
    built: native.Library,
    scheme: Scheme,
    of: SliceTensors,
    gradient: Tensor,
    step: UpdateStep,
    statistics: Statistics | None,
) -> None:
    check_step(scheme, of, gradient, step)
    if of.groups is not None and not _within(of.groups, len(step.hypers)):
        raise AssertionError(f"groups must be in [0, {len(step.hypers)}): {of.groups.unique().tolist()}")
    table = kinds.table(step)
    root = vector_root() if _needs_torch_root(step) else None
    moments = [moment.data_ptr() for moment in of.moments] + [None, None]
    scales = [scale.data_ptr() for scale in of.scales] + [None, None]
    codes = blockwise.tables(of.storage.device) if of.scales else None
    call = _Update(
        numel=of.numel,
        stochastic=step_key(step.number),
        grad=gradient.data_ptr(),
        storage=of.storage.data_ptr(),
        master=_address(of.master),
        moment1=moments[0],
        moment2=moments[1],
        scale1=scales[0],
        scale2=scales[1],
        codes=_address(codes),
        groups=_address(of.groups),
        keys=_address(of.keys),
        table=table.data_ptr(),
        root=root.address if root is not None else None,
        statistics=_address(statistics.blocks if statistics is not None else None),
        grad_type=native.TYPES[gradient.dtype],
        storage_type=native.TYPES[of.storage.dtype],
        master_kind=kinds.MASTERS[scheme.master],
        state_kind=kinds.state(scheme, of),
        algorithm=kinds.algorithm(step),
        threads=torch.get_num_threads(),
    )
    built.update(ctypes.addressof(call))


def _within(groups: Tensor, count: int) -> bool:
    least, most = torch.aminmax(groups)
    return int(least) >= 0 and int(most) < count


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
