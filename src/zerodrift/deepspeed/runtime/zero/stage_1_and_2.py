"""`deepspeed.runtime.zero.stage_1_and_2`: asked whether an optimizer is one of stages 1 and 2.

The estimates of memory are those of `estimates.py`.
"""

from __future__ import annotations

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from zerodrift.deepspeed.optimizer import StageOfOptimizer

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]

__getattr__ = unsupported.lookup(__name__)

DeepSpeedZeroOptimizer = StageOfOptimizer("DeepSpeedZeroOptimizer", (), {"stages": (1, 2)})
