"""`deepspeed.ops.lion.cpu_lion`: where DeepSpeed has DeepSpeedCPULion."""

from __future__ import annotations

from zerodrift.deepspeed.ops.lion import DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]
