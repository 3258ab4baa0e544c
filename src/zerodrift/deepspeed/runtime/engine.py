"""`deepspeed.runtime.engine`: the engine's class, for annotations and `isinstance`."""

from __future__ import annotations

from zerodrift.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
