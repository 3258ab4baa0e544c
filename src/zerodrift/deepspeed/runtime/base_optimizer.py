"""`deepspeed.runtime.base_optimizer`: the optimizer's class, for `isinstance`."""

from __future__ import annotations

from zerodrift.deepspeed.optimizer import DeepSpeedOptimizer
from zerodrift.deepspeed.optimizer import DeepSpeedOptimizer as ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
