"""`deepspeed.ops.adam.cpu_adam`: where DeepSpeed has DeepSpeedCPUAdam."""

from __future__ import annotations

from zerodrift.deepspeed.ops.adam import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
