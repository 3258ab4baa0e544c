"""From a parameter to whoever holds its values: the engine, a slice of `zero.Init`, or the parameter itself.

DeepSpeed's functions take parameters and nothing else, so what is known of one hangs on it: `ds_id` and its
kin, which PEFT, TRL and transformers read, and `ENGINE_PARAMETER`, which leads to the engine.

Invariant: a parameter has an owner exactly while an engine runs it, and keeps no engine alive.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import ItemsView
from dataclasses import dataclass

import torch
from torch import nn

from zerodrift.engine.engine import Engine
from zerodrift.engine.habits.absent_parameter import STAYS, AbsentParameter
from zerodrift.engine.native import native
from zerodrift.errors import ModelError, UnsupportedError

ENGINE_PARAMETER = "_zerodrift_owner"
"""The attribute of a parameter that an engine runs."""

GATHER = (
    "Do so inside `zero.GatheredParameters`, with a `modifier_rank` to change it, or in a forward of its "
    "module. `engine.module_state_dict()` and `accelerator.get_state_dict(model)` are whole."
)


class ZeroParamType(enum.Enum):
    """How a parameter rests between steps; values as in DeepSpeed."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether the full values of a parameter are there; values as in DeepSpeed."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@dataclass(frozen=True, slots=True)
class EngineParameter:
    """A parameter's place in a running engine."""

    engine: weakref.ref[Engine]
    name: str

    def running(self) -> Engine:
        engine = self.engine()
        if engine is None:
            raise engine_gone(self.name)
        return engine


def mark_parameters(engine: Engine) -> None:
    """Hang on every parameter where it is, and what others read of a sharded one."""
    parameters = dict(engine.module.named_parameters(remove_duplicate=False))
    segments = native(engine.executor).segments
    stage_3 = engine.plan.policy.sharding.stage == 3
    for number, row in enumerate(engine.plan.rows):
        parameter = parameters[row.name]
        setattr(parameter, ENGINE_PARAMETER, EngineParameter(weakref.ref(engine), row.name))
        update = row.columns.update
        if engine.plan.policy.mode.autocast and update is not None and not row.columns.pinned:
            wire = update.reduce.wire.torch
            if wire is engine.plan.policy.mode.dtype.torch:
                parameter.comm_dtype = wire  # type: ignore[attr-defined]
        if stage_3:
            mark(parameter, number)
        if segments[row.segment].sharded:
            if isinstance(parameter, AbsentParameter):
                type(parameter).advice = GATHER
            setattr(parameter, STAYS, True)  # as with DeepSpeed, whose pieces stay where they are too
    native(engine.executor).guard.allow_absent_values()  # Lightning takes a state dict, and drops it
    if any(segment.sharded for segment in segments):
        for module in engine.module.modules():
            module.ds_external_parameters = _external_parameters  # type: ignore[assignment]


def _external_parameters() -> ItemsView[str, nn.Parameter]:
    """A module's `ds_external_parameters()`: none, since what it uses of others is gathered with its unit."""
    return {}.items()


def mark(parameter: nn.Parameter, number: int) -> None:
    """What DeepSpeed hangs on every parameter of stage 3, also on one that is whole here: a small one, or any
    on one rank. Only inside `GatheredParameters` it reads as available; gathering it again costs nothing."""
    parameter.ds_id = number  # type: ignore[attr-defined]
    parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
    parameter.ds_numel = parameter.numel()  # type: ignore[attr-defined]
    parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # type: ignore[attr-defined]
    parameter.ds_param_type = ZeroParamType.PARTITIONED  # type: ignore[attr-defined]
    parameter.ds_active_sub_modules = set()  # type: ignore[attr-defined]


def unmark(parameter: nn.Parameter) -> None:
    for name in (
        "ds_id",
        "ds_shape",
        "ds_numel",
        "ds_status",
        "ds_param_type",
        "ds_active_sub_modules",
        "comm_dtype",
        STAYS,
        ENGINE_PARAMETER,
    ):
        if hasattr(parameter, name):
            delattr(parameter, name)


def engine_gone(name: str) -> UnsupportedError:
    """For what is used after its engine."""
    return UnsupportedError(
        name, "must be used while its engine exists", got="one that is gone", do="Keep the engine."
    )


def engine_parameter(parameter: torch.Tensor) -> EngineParameter | None:
    """Where a parameter is, None for one that no engine runs."""
    return getattr(parameter, ENGINE_PARAMETER, None)


def require_engine_parameter(parameter: torch.Tensor) -> tuple[Engine, str]:
    """The engine that runs a parameter, and the parameter's name in it."""
    owner = engine_parameter(parameter)
    if owner is None:
        raise ModelError(
            "parameter",
            "must be one of a model that `initialize` was given",
            got=f"another, of shape {list(parameter.shape)}",
            do="Pass parameters of `engine.module`.",
        )
    return owner.running(), owner.name
