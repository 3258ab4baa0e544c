"""`deepspeed.accelerator.real_accelerator`: where some scripts import `get_accelerator` from."""

from __future__ import annotations

from zerodrift.deepspeed.accelerator import get_accelerator, is_current_accelerator_supported

__all__ = ["get_accelerator", "is_current_accelerator_supported"]
