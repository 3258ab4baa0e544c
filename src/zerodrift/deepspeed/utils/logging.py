"""`deepspeed.utils.logging`: where scripts log to, whose handlers and level are the script's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

__all__ = ["log_dist", "logger", "warning_once"]

logger = logging.getLogger("zerodrift.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the named ranks; on all of them where -1 is one, and where torch.distributed does not run."""
    running = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if running else -1
    if not running or not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.cache
def warning_once(message: str) -> None:
    """Warn, but for what was warned of already."""
    logger.warning(message)
