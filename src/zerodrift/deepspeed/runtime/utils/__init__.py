"""`deepspeed.runtime.utils`: what scripts take from it. The name is DeepSpeed's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.utils import logger

__all__ = ["move_to_device", "see_memory_usage"]


__getattr__ = unsupported.lookup(__name__)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the GPU memory of this process; nothing without a GPU, or unless `force`."""
    if force and torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GiB allocated, %.2f GiB at most", message, now, most)


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool] | None = None
) -> Any:
    """Tensors in lists, tuples and dicts to a device; those alone of which `criterion_func` says so."""
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(part, device, criterion_func) for part in item)
    if isinstance(item, dict):
        return {key: move_to_device(part, device, criterion_func) for key, part in item.items()}
    return item
