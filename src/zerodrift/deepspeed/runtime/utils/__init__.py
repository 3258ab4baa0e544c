"""`deepspeed.runtime.utils`: what scripts take from it. The name is DeepSpeed's."""

from __future__ import annotations

import torch

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.utils import logger

__all__ = ["see_memory_usage"]


__getattr__ = unsupported.lookup(__name__)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the GPU memory of this process; nothing without a GPU, or unless `force`."""
    if force and torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GiB allocated, %.2f GiB at most", message, now, most)
