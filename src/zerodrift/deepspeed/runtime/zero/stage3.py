"""`deepspeed.runtime.zero.stage3`: asked whether an optimizer is one of stage 3.

The estimates of memory are those of `estimates.py`.
"""

from __future__ import annotations

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.estimates import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zerodrift.deepspeed.optimizer import StageOfOptimizer

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

__getattr__ = unsupported.lookup(__name__)

DeepSpeedZeroOptimizer_Stage3 = StageOfOptimizer("DeepSpeedZeroOptimizer_Stage3", (), {"stages": (3,)})
