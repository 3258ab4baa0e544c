"""Values of one parameter in an engine: `safe_get_*`, `safe_set_*`, and the wire dtype of its gradient.

DeepSpeed's functions take a parameter and nothing else, so each parameter has an attribute that leads to its
engine.

The full functions are collective: all ranks must call them in the same order. The local functions are for
this rank's shard, which is flat, may be empty, and differs in length between ranks. Unlike DeepSpeed's they
work at every stage, and the local gradient is the accumulated, averaged, unscaled one in fp32.

Invariants: a parameter has `ENGINE_PARAMETER` exactly while an engine runs it, and keeps no engine alive. A
value that was set is returned by the next read, and is where the next update starts.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerodrift.deepspeed.parameters.attributes import mark, show_shard, unmark
from zerodrift.deepspeed.tools.functions import LEAF_MODULE, get_z3_leaf_modules
from zerodrift.engine import (
    STAYS,
    AbsentParameter,
    Engine,
    FlatSegment,
    FlatShard,
    ParameterHandle,
    TrainedSegment,
    mark_storage_changed,
    native,
)
from zerodrift.errors import ModelError, UnsupportedError
from zerodrift.plan import Row
from zerodrift.policy import SAFE_MODULES, Reduction

ENGINE_PARAMETER = "_zerodrift_owner"

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"
ZERO_OPTIMIZATION = "zero_optimization"

GATHER = (
    "Do so inside `zero.GatheredParameters`, with a `modifier_rank` to change it, or in a forward of its "
    "module. `engine.module_state_dict()` and `accelerator.get_state_dict(model)` are whole."
)


# --- enums of DeepSpeed, with its values ------------------------------------------------------------------

_ENUM: Any = enum.Enum
_make = functools.partial(_ENUM, module=__name__)
_STAGES = ("disabled", "optimizer_states", "gradients", "weights", "max_stage")
_STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
ZeroStageEnum = _make("ZeroStageEnum", {name: min(n, 3) for n, name in enumerate(_STAGES)}, type=int)
OffloadDeviceEnum = _make("OffloadDeviceEnum", {name: name for name in ("none", "cpu", "nvme")}, type=str)
OffloadStateTypeEnum = _make("OffloadStateTypeEnum", {name: name for name in _STATES}, type=str)


# --- a parameter's engine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineParameter:
    engine: weakref.ref[Engine]
    name: str

    def running(self) -> Engine:
        engine = self.engine()
        if engine is None:
            raise engine_gone(self.name)
        return engine


def engine_gone(name: str) -> UnsupportedError:
    must, got = "must be used while its engine exists", "one that is gone"
    do = "Keep the engine. Lightning makes another one for `validate` and `test`: save before those."
    return UnsupportedError(name, must, got=got, do=do)


def engine_parameter(parameter: torch.Tensor) -> EngineParameter | None:
    return getattr(parameter, ENGINE_PARAMETER, None)


def require_engine_parameter(parameter: torch.Tensor) -> tuple[Engine, str]:
    owner = engine_parameter(parameter)
    if owner is None:
        must, got = "must be of a model that `initialize` was given", f"one of shape {list(parameter.shape)}"
        raise ModelError("parameter", must, got=got, do="Pass parameters of `engine.module`.")
    return owner.running(), owner.name


def mark_parameters(engine: Engine) -> None:
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    segments = native(engine.executor).segments
    policy = engine.plan.policy
    for number, row in enumerate(engine.plan.rows):
        parameter = parameters[row.name]
        setattr(parameter, ENGINE_PARAMETER, EngineParameter(weakref.ref(engine), row.name))
        update = row.columns.update
        if policy.mode.autocast and update is not None and not row.columns.pinned:
            wire = update.reduce.wire.torch
            if wire is policy.mode.dtype.torch:
                setattr(parameter, PARAM_COMM_DTYPE_ATTR_NAME, wire)
        segment = segments[row.segment]
        if policy.sharding.stage == 3:
            mark(parameter, number, engine.mesh.group(segment.axis))
            show_shard(parameter, _shard(segment.storage, segment, row))
        if segment.sharded:
            if isinstance(parameter, AbsentParameter):
                type(parameter).advice = GATHER
            setattr(parameter, STAYS, True)  # `module.cpu()` leaves shards in place, as in DeepSpeed
    for module in get_z3_leaf_modules(engine.module) if policy.sharding.stage == 3 else ():
        for parameter in module.parameters():
            vars(parameter).setdefault(LEAF_MODULE, module)  # the outermost
    native(engine.executor).guard.allows_absent_values = True  # Lightning makes a state dict and drops it
    if any(segment.sharded for segment in segments):
        for module in engine.module.modules():
            # Parameters of other modules are gathered with their units.
            module.ds_external_parameters = {}.items  # type: ignore[assignment]


def unmark_parameters(module: nn.Module) -> None:
    for parameter in module.parameters():
        unmark(parameter)
        for name in (PARAM_COMM_DTYPE_ATTR_NAME, STAYS, ENGINE_PARAMETER, LEAF_MODULE):
            if hasattr(parameter, name):
                delattr(parameter, name)


# --- whole values -----------------------------------------------------------------------------------------


def _values(param: nn.Parameter) -> ParameterHandle:
    engine, name = require_engine_parameter(param)
    return engine.parameter(name)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the master weights in fp32. Return None for a parameter that no engine trains."""
    return None if engine_parameter(param) is None or _is_frozen(param) else _values(param).master


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the master weights. The visible weight follows."""
    _values(param).master = value.float()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient of this step so far. Return None outside a step, and for a frozen parameter."""
    owner = engine_parameter(param)
    if owner is None or not param.requires_grad or not owner.running().micro_batches:
        return None
    return _values(param).gradient


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient. `value` is averaged and unscaled, like the result of `safe_get_full_grad`."""
    _values(param).gradient = value.float()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a moment in fp32, by torch's name for it, or None before the first step and for a parameter that
    the engine does not train."""
    if engine_parameter(param) is None or not _locate(param)[2].trained:
        return None
    return _values(param).state.get(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    _values(param).set_moment(optim_state_key, value.float())


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the gradients of several parameters by `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


# --- this rank's shard ------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's shard of the master weights, None for a frozen parameter. Flat, fp32."""
    if _is_frozen(param):
        return None
    _, piece, row = _locate(param)
    return _shard(piece.weights().float(), piece.segment, row).clone()


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's shard of the master weights. Collective if the visible weight is not sharded."""
    engine, piece, row = _locate(param)
    segment, flat = piece.segment, piece.weights().float()
    _write(_shard(flat, segment, row), row, value)
    piece.set_weights(flat)
    segment.drop(alone=True)
    segment.sync_storage(native(engine.executor).updater).wait()
    mark_storage_changed(segment)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's shard of the gradient so far. Flat, fp32. Return None outside a step."""
    engine, piece, row = _locate(param)
    segment = piece.segment
    if not isinstance(segment, TrainedSegment) or not engine.micro_batches:
        return None
    reduced = _reduced(engine, segment, row)
    if reduced is None:
        reduced = torch.zeros(segment.spec.padded // segment.ranks, device=segment.storage.device)
    return _shard(reduced, segment, row).float() * engine.progress.unscale


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    engine, piece, row = _locate(param)
    reduced = _reduced(engine, piece.segment, row)
    if reduced is None:
        raise ModelError(row.name, "must have a gradient to replace", got="none in this step")
    _write(_shard(reduced, piece.segment, row), row, value / engine.progress.unscale)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of this rank's shard of a moment. Flat, fp32. Return None before the first step."""
    _, piece, row = _locate(param)
    flat = piece.moments().get(optim_state_key)
    return None if flat is None else _shard(flat, piece.segment, row).clone()


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    _, piece, row = _locate(param)
    moments = piece.moments()
    if optim_state_key not in moments:
        must, got = f"must have optimizer state {optim_state_key!r}", ", ".join(moments) or "none yet"
        raise ModelError(row.name, must, got=got, do="State is there after the first step.")
    _write(_shard(moments[optim_state_key], piece.segment, row), row, value)
    piece.set_moment(optim_state_key, moments[optim_state_key])


def _is_frozen(param: nn.Parameter) -> bool:
    """Return True for a parameter that was frozen at `initialize`, in an engine that trains others."""
    engine, _, row = _locate(param)
    return engine.updater is not None and not row.trained


def _locate(param: nn.Parameter) -> tuple[Engine, FlatShard, Row]:
    engine, name = require_engine_parameter(param)
    row, executor = engine.parameter(name).row, native(engine.executor)
    return engine, FlatShard(executor.segments[row.segment], executor.updater, (0, 1)), row


def _reduced(engine: Engine, segment: FlatSegment, row: Row) -> torch.Tensor | None:
    """Return this rank's sum of a segment's gradients, or None before a backward. Raise if it is in parts."""
    engine.progress.require_whole_sum(row.name)
    native(engine.executor).gradients.flush()
    return segment.reduced if isinstance(segment, TrainedSegment) else None


def _shard(flat: torch.Tensor, segment: FlatSegment, row: Row) -> torch.Tensor:
    """Return the view of one parameter in a flat segment, or in this rank's shard of it."""
    return flat[row.within(segment.start_of(flat), flat.numel())]


def _write(shard: torch.Tensor, row: Row, value: torch.Tensor) -> None:
    if value.numel() != shard.numel():
        must = f"must get as many values as this rank holds, {shard.numel()}"
        raise ModelError(row.name, must, got=value.numel())
    with torch.no_grad():
        shard.copy_(value.reshape(-1))


# --- `deepspeed.runtime.torch_autocast`: the dtype of a gradient on the wire ------------------------------


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Return the classes whose gradients are sent in the autocast dtype, unless the config names others."""
    classes = [getattr(nn, name.rpartition(".")[2]) for name in SAFE_MODULES]
    return [f"{kind.__module__}.{kind.__name__}" for kind in classes]


def has_comm_dtype(param: nn.Parameter) -> bool:
    """Return True if the gradient is sent in the autocast dtype."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def plain_wire(reduce: Reduction) -> torch.dtype:
    """Return the dtype of the wire; of the sum, where values travel in a narrow format."""
    return (reduce.wire if reduce.wire.format is None else reduce.sum).torch


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """Return the planned dtype of the gradient on the wire, the parameter's own dtype without an engine."""
    owner = engine_parameter(param)
    if owner is not None:
        row = owner.running().plan.row(owner.name)
        if row is not None and row.columns.update is not None:
            return plain_wire(row.columns.update.reduce)
    return getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)


def get_all_comm_dtypes(params: Iterable[nn.Parameter]) -> set[torch.dtype]:
    return {get_comm_dtype(parameter) for parameter in params}


def sort_dtypes(dtypes: list[torch.dtype]) -> list[torch.dtype]:
    return sorted(dtypes, key=str)
