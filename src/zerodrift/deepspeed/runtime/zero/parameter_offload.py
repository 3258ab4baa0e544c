"""`deepspeed.runtime.zero.parameter_offload`: who gathers and releases parameters in DeepSpeed."""

from __future__ import annotations

from zerodrift.deepspeed.parameter_offload import ParameterOffload as DeepSpeedZeRoOffload

__all__ = ["DeepSpeedZeRoOffload"]
