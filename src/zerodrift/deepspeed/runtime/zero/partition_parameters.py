"""`deepspeed.runtime.zero.partition_parameters`: where PEFT, TRL and others import these from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerodrift.deepspeed.runtime.zero.utils import is_zero_param
from zerodrift.deepspeed.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
]

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """transformers replaces this while a model is built, to keep DeepSpeed from rounding rotary tables.
    Nothing here rounds what `torch.arange` and its kin make: the function itself comes back."""
    return fn
