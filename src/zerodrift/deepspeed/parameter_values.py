"""`safe_get_*` and `safe_set_*`: read and write a parameter's master weights, gradient and moments.

The full functions are collective: all ranks must call them in the same order. The local ones are for this
rank's shard, which is flat, may be empty, and differs in length between ranks. DeepSpeed returns the last
micro-batch's local gradient, or works at stage 3 only; these work at every stage and return the accumulated,
averaged, unscaled gradient in fp32.

Invariant: a value that was set is the value that is read, and the one that the next update starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zerodrift.deepspeed.parameters import engine_parameter, require_engine_parameter
from zerodrift.engine.engine import Engine
from zerodrift.engine.habits.storage_writes import mark_storage_changed
from zerodrift.engine.native import native
from zerodrift.engine.step.segment import FlatSegment
from zerodrift.engine.step.trained_segment import TrainedSegment
from zerodrift.errors import ModelError
from zerodrift.plan.table import Row

Parameter = torch.nn.Parameter


def safe_get_full_fp32_param(param: Parameter) -> torch.Tensor | None:
    """Return the master weights in fp32, or None if no engine runs the parameter."""
    if engine_parameter(param) is None:
        return None
    engine, name = require_engine_parameter(param)
    return engine.parameter(name).master


def safe_set_full_fp32_param(param: Parameter, value: torch.Tensor) -> None:
    """Replace the master weights. The visible weight follows."""
    engine, name = require_engine_parameter(param)
    engine.parameter(name).master = value.float()


def safe_get_full_grad(param: Parameter) -> torch.Tensor | None:
    """Return the gradient of this step so far. Return None outside a step, and for a parameter that is not
    trained."""
    if engine_parameter(param) is None or not param.requires_grad:
        return None
    engine, name = require_engine_parameter(param)
    return engine.parameter(name).gradient if engine.micro_batches else None


def safe_set_full_grad(param: Parameter, value: torch.Tensor) -> None:
    """Replace the gradient. `value` is averaged and unscaled, like the result of `safe_get_full_grad`."""
    engine, name = require_engine_parameter(param)
    engine.parameter(name).gradient = value.float()


def safe_get_full_optimizer_state(param: Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a moment in fp32, by torch's name for it. Return None before the first step."""
    if engine_parameter(param) is None:
        return None
    engine, name = require_engine_parameter(param)
    return engine.parameter(name).state.get(optim_state_key)


def safe_set_full_optimizer_state(param: Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    engine, name = require_engine_parameter(param)
    engine.parameter(name).set_moment(optim_state_key, value.float())


def safe_update_full_grad_vectorized(
    param_list: Sequence[Parameter], update_func: Callable[[torch.Tensor, Parameter], torch.Tensor]
) -> None:
    """Replace the gradients of several parameters by `update_func(gradient, parameter)`."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


# --- this rank's shard ------------------------------------------------------------------------------------


def safe_get_local_fp32_param(param: Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's shard of the master weights. Flat, fp32."""
    engine, segment, row = _locate(param)
    return _row_of(_master(engine, segment), segment, row).clone()


def safe_set_local_fp32_param(param: Parameter, value: torch.Tensor) -> None:
    """Replace this rank's shard of the master weights. Collective if the visible weight is not sharded."""
    engine, segment, row = _locate(param)
    flat = _master(engine, segment)
    _write(flat, segment, row, value)
    updater = native(engine.executor).updater
    if updater is None or not isinstance(segment, TrainedSegment):
        segment.storage.copy_(flat)
    else:
        updater.set_master(segment.number, flat)
    segment.drop()
    segment.sync_storage().wait()
    mark_storage_changed(segment)


def safe_get_local_grad(param: Parameter) -> torch.Tensor | None:
    """Return a copy of this rank's shard of the gradient so far. Flat, fp32. Return None outside a step."""
    engine, segment, row = _locate(param)
    if not isinstance(segment, TrainedSegment) or not engine.micro_batches:
        return None
    engine.progress.require_whole_sum(row.name)
    native(engine.executor).gradients.flush()
    if segment.reduced is None:
        zeros = torch.zeros(segment.spec.padded // segment.ranks, device=segment.storage.device)
        return _row_of(zeros, segment, row)
    return _row_of(segment.reduced, segment, row).float() * engine.progress.unscale


def safe_set_local_grad(param: Parameter, value: torch.Tensor) -> None:
    engine, segment, row = _locate(param)
    engine.progress.require_whole_sum(row.name)
    native(engine.executor).gradients.flush()
    if not isinstance(segment, TrainedSegment) or segment.reduced is None:
        raise ModelError(row.name, "must have a gradient to replace", got="none in this step")
    _write(segment.reduced, segment, row, value / engine.progress.unscale)


def safe_get_local_optimizer_state(param: Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of this rank's shard of a moment. Flat, fp32. Return None before the first step."""
    engine, segment, row = _locate(param)
    updater = native(engine.executor).updater
    if updater is None or not isinstance(segment, TrainedSegment):
        return None
    flat = updater.states(segment.number).get(optim_state_key)
    return None if flat is None else _row_of(flat, segment, row).clone()


def safe_set_local_optimizer_state(param: Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    engine, segment, row = _locate(param)
    updater = native(engine.executor).updater
    moments = {} if updater is None else updater.states(segment.number)
    if updater is None or optim_state_key not in moments:
        raise ModelError(
            row.name,
            f"must have optimizer state {optim_state_key!r}",
            got=", ".join(moments) or "none yet",
            do="State is there after the first step.",
        )
    _write(moments[optim_state_key], segment, row, value)
    updater.set_state(segment.number, optim_state_key, moments[optim_state_key])


def _locate(param: Parameter) -> tuple[Engine, FlatSegment, Row]:
    engine, name = require_engine_parameter(param)
    row = engine.plan.row(name)
    if row is None:
        raise AssertionError(f"{name} has an owner and no row")
    return engine, native(engine.executor).segments[row.segment], row


def _master(engine: Engine, segment: FlatSegment) -> torch.Tensor:
    """Return a copy of this rank's master weights of a segment. Flat, fp32."""
    updater = native(engine.executor).updater
    if updater is None or not isinstance(segment, TrainedSegment):
        return segment.storage.to(torch.float32, copy=True)
    return updater.master(segment.number)


def _row_of(flat: torch.Tensor, segment: FlatSegment, row: Row) -> torch.Tensor:
    """Return the elements of one parameter in a flat segment, or in this rank's shard of it."""
    return flat[_span(flat, segment, row)]


def _write(flat: torch.Tensor, segment: FlatSegment, row: Row, value: torch.Tensor) -> None:
    span = _span(flat, segment, row)
    if value.numel() != span.stop - span.start:
        must = f"must get as many values as this rank holds, {span.stop - span.start}"
        raise ModelError(row.name, must, got=value.numel())
    with torch.no_grad():
        flat[span] = value.reshape(-1).to(flat.dtype)


def _span(flat: torch.Tensor, segment: FlatSegment, row: Row) -> slice:
    start = 0 if flat.numel() == segment.spec.padded else segment.rank * flat.numel()
    low = max(row.offset - start, 0)
    return slice(low, max(low, min(row.offset + row.numel - start, flat.numel())))
