"""`deepspeed.utils.logging`: where some scripts import the logger from."""

from __future__ import annotations

from zerodrift.deepspeed.utils import log_dist, logger

__all__ = ["log_dist", "logger"]
