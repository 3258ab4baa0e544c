"""`deepspeed.runtime.zero`: the same as `deepspeed.zero`."""

from __future__ import annotations

from typing import Any

from zerodrift.deepspeed import zero
from zerodrift.deepspeed.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]


def __getattr__(name: str) -> Any:
    return getattr(zero, name)
