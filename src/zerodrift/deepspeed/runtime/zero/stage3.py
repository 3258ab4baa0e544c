"""`deepspeed.runtime.zero.stage3`: asked whether an optimizer is one of stage 3."""

from __future__ import annotations

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.optimizer import StageOfOptimizer

__all__ = ["DeepSpeedZeroOptimizer_Stage3"]

__getattr__ = unsupported.lookup(__name__)

DeepSpeedZeroOptimizer_Stage3 = StageOfOptimizer("DeepSpeedZeroOptimizer_Stage3", (), {"stages": (3,)})
