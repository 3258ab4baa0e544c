"""`deepspeed.accelerator.abstract_accelerator`: the type that scripts annotate with."""

from __future__ import annotations

from zerodrift.deepspeed.accelerator import Accelerator as DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator"]
