"""`deepspeed.runtime.zero.config`: the stages, by DeepSpeed's names."""

from __future__ import annotations

import enum

from zerodrift.deepspeed import unsupported

__all__ = ["ZERO_OPTIMIZATION", "ZeroStageEnum"]

ZERO_OPTIMIZATION = "zero_optimization"

__getattr__ = unsupported.lookup(__name__)


class ZeroStageEnum(int, enum.Enum):
    """What of a model's state is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796 (DeepSpeed's: another name of the last)
