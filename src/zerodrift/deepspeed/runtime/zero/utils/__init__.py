"""`deepspeed.runtime.zero.utils`: asked whether a parameter is one that stage 3 shards."""

from __future__ import annotations

from typing import Any

import torch

from zerodrift.deepspeed import unsupported

__all__ = ["is_zero_param"]

__getattr__ = unsupported.lookup(__name__)


def is_zero_param(parameter: Any) -> bool:
    """Whether it has what stage 3 and `zero.Init` hang on parameters."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")
