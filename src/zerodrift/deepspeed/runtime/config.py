"""`deepspeed.runtime.config`: the error that a wrong config raises."""

from __future__ import annotations

from zerodrift.deepspeed import unsupported
from zerodrift.errors import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]


__getattr__ = unsupported.lookup(__name__)
