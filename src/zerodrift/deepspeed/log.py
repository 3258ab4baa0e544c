"""DeepSpeed's logger and the functions that write to it. Handlers and level are the script's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

logger = logging.getLogger("zerodrift.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks. Log on all of them if -1 is among them or torch.distributed does not run."""
    running = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if running else -1
    if not running or not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.cache
def warning_once(message: str) -> None:
    """Warn, unless the same text was a warning before."""
    logger.warning(message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the GPU memory of this process if `force` is set and there is a GPU."""
    if force and torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        logger.info("%s: %.2f GiB allocated, %.2f GiB at most", message, now, most)
