"""`deepspeed.zero`: models in pieces, and their full values for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.parameter_offload import ParameterOffload as DeepSpeedZeRoOffload
from zerodrift.deepspeed.parameters import ZeroParamStatus, ZeroParamType
from zerodrift.deepspeed.zero.external import register_external_parameter, unregister_external_parameter
from zerodrift.deepspeed.zero.gathered import GatheredParameters
from zerodrift.deepspeed.zero.init import Init

__all__ = [
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]


__getattr__ = unsupported.lookup(__name__)


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """The engine's module. Its units gather themselves when they run, so there is nothing to unwrap."""
    yield model.module
