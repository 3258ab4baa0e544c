"""`deepspeed.monitor.csv_monitor`."""

from __future__ import annotations

from zerodrift.deepspeed.monitor.monitor import csvMonitor

__all__ = ["csvMonitor"]
