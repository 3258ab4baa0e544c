"""`deepspeed.runtime.zero.stage_1_and_2`: asked whether an optimizer is one of stages 1 and 2."""

from __future__ import annotations

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.optimizer import StageOfOptimizer

__all__ = ["DeepSpeedZeroOptimizer"]

__getattr__ = unsupported.lookup(__name__)

DeepSpeedZeroOptimizer = StageOfOptimizer("DeepSpeedZeroOptimizer", (), {"stages": (1, 2)})
