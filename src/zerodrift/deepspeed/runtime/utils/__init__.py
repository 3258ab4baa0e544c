"""`deepspeed.runtime.utils`: what scripts take from it. The name is DeepSpeed's."""

from __future__ import annotations

from typing import Any

import torch

from zerodrift.deepspeed import absent
from zerodrift.deepspeed.utils import logger

__all__ = ["see_memory_usage"]

_ABSENT = absent.absent(
    "deepspeed.runtime.utils",
    {
        "clip_grad_norm_": "Write `gradient_clipping` in the config: the norm is global and exact.",
        "get_global_norm": "Use `engine.get_global_grad_norm()`.",
        "get_grad_norm": "Use `engine.get_global_grad_norm()`.",
        "partition_uniform": "Units and segments are the plan's.",
        "partition_balanced": "Units and segments are the plan's.",
    },
)


def __getattr__(name: str) -> Any:
    return absent.missing(__name__, name, __all__, _ABSENT)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the GPU memory of this process; nothing without a GPU, or unless `force`."""
    if force and torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GiB allocated, %.2f GiB at most", message, now, most)
