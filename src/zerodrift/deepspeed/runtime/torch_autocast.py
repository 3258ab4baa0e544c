"""`deepspeed.runtime.torch_autocast`: in which dtype a parameter's gradient travels.

The answers are the plan's `reduce` column, in every mode. DeepSpeed keeps the autocast settings of the last
engine in the process; here an engine's settings are its own, and are asked of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.parameters import engine_parameter
from zerodrift.policy.resolve import SAFE_MODULES

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"


__getattr__ = unsupported.lookup(__name__)


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Classes whose parameters travel in the autocast dtype unless the config names others."""
    classes = [getattr(torch.nn, name.rpartition(".")[2]) for name in SAFE_MODULES]
    return [f"{kind.__module__}.{kind.__name__}" for kind in classes]


def has_comm_dtype(param: torch.nn.Parameter) -> bool:
    """Whether autocast makes the gradient travel in its dtype."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: torch.nn.Parameter) -> torch.dtype:
    """What a gradient travels in: of a running engine's parameter the planned wire, else its own dtype."""
    owner = engine_parameter(param)
    if owner is not None:
        row = owner.running().plan.row(owner.name)
        if row is not None and row.columns.update is not None:
            return row.columns.update.reduce.wire.torch
    return getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)


def get_all_comm_dtypes(params: Iterable[torch.nn.Parameter]) -> set[torch.dtype]:
    return {get_comm_dtype(parameter) for parameter in params}


def sort_dtypes(dtypes: list[torch.dtype]) -> list[torch.dtype]:
    return sorted(dtypes, key=str)
