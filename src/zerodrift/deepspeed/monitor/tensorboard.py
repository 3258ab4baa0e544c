"""`deepspeed.monitor.tensorboard`."""

from __future__ import annotations

from zerodrift.deepspeed.monitor.monitor import TensorBoardMonitor

__all__ = ["TensorBoardMonitor"]
