"""`deepspeed.ops.adam.fused_adam`: where DeepSpeed has FusedAdam."""

from __future__ import annotations

from zerodrift.deepspeed.ops.adam import FusedAdam

__all__ = ["FusedAdam"]
