"""`deepspeed.ops.lion.fused_lion`: where DeepSpeed has FusedLion."""

from __future__ import annotations

from zerodrift.deepspeed.ops.lion import FusedLion

__all__ = ["FusedLion"]
