"""`deepspeed.runtime.config`: the error that a wrong config raises."""

from __future__ import annotations

from zerodrift.deepspeed import absent
from zerodrift.errors import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]


__getattr__ = absent.lookup(__name__)
