"""`deepspeed.monitor.wandb`."""

from __future__ import annotations

from zerodrift.deepspeed.monitor.monitor import WandbMonitor

__all__ = ["WandbMonitor"]
