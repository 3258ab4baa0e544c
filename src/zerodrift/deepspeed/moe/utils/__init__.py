"""`deepspeed.moe.utils`: questions about DeepSpeed's own expert layers, of which a model here has none.
The name is DeepSpeed's."""

from __future__ import annotations

from typing import Any

from torch import nn

from zerodrift.deepspeed import unsupported

__all__ = ["has_moe_layers", "is_moe_param", "is_moe_param_group"]

__getattr__ = unsupported.lookup(__name__)


def has_moe_layers(m: nn.Module) -> tuple[bool, list[int]]:
    return False, []


def is_moe_param(param: nn.Parameter) -> bool:
    return False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe", False))
